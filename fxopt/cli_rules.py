"""`fxopt rules` and `fxopt ceilings`: what labels are drawn from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxopt.cli_output import CliError, pairs, rows, taught

if TYPE_CHECKING:
    import torch
    import typer

    from profiler_core.roofline import Ceilings


def add_commands(app: typer.Typer) -> None:
    import typer

    as_json_option = typer.Option(False, "--json", help="Print JSON.")

    @app.command(
        "rules",
        help=taught(
            "The rules that give labels. Condition, thresholds, reason and reference of each.\n\nA label "
            "says what limits a kernel or a graph. A rule that lacks a metric does not fire, and the report says so.",
            "fxopt rules --thresholds mine.toml",
            then="docs/labels.md, with how often the labels are right.",
        ),
        short_help="The rules that give labels, with their thresholds.",
    )
    def rules(
        thresholds: Path | None = typer.Option(
            None,
            "--thresholds",
            help="A TOML file of thresholds over the defaults; else the one that FXOPT_THRESHOLDS names.",
            metavar="FILE",
        ),
        as_json: bool = as_json_option,
    ) -> None:
        table = described(thresholds)
        spelt = [{name: _words(value) for name, value in rule.items()} for rule in table]
        if as_json or not sys.stdout.isatty():
            rows(table if as_json else spelt, as_json, "no rules")
            return
        for index, rule in enumerate(spelt):  # a table of so many columns fits no terminal
            print("\n" * (index > 0), end="")
            pairs({name: value for name, value in rule.items() if value}, False)

    @app.command(
        "ceilings",
        help=taught(
            "What this machine's device can reach. Measured once, and kept with the plans.\n\nCopies and matrix "
            "products of each type: the roofline that reports draw, and that labels are drawn against.",
            "fxopt ceilings --measure",
            then="fxopt rules, for what is made of them.",
        ),
        short_help="What this machine's device can reach, measured.",
    )
    def ceilings(
        device: str | None = typer.Option(
            None, "--device", help="cpu or cuda; by default cuda where there is one.", metavar="DEVICE"
        ),
        measure: bool = typer.Option(False, "--measure", help="Measure again, in place of what is kept."),
        as_json: bool = as_json_option,
    ) -> None:
        found, file = kept_ceilings(_device(device), measure)
        rates: list[dict[str, Any]] = [
            {
                "dtype": name,
                "flops_per_s": rate,
                "ridge_flop_per_byte": rate / found.copy_bytes_per_s,
            }
            for name, rate in sorted(found.flops_per_s.items())
        ]
        environment = found.environment
        head = {
            "device": found.device,
            "measured": found.measured,
            "torch": environment.get("torch"),
            "threads": environment.get("threads"),
            "last_level_cache_bytes": environment.get("last_level_cache_bytes"),
            "copy_bytes_per_s": found.copy_bytes_per_s,
            "file": str(file) if file else None,
        }
        if as_json:
            pairs({**head, "rates": rates}, True)
            return
        shown = {**head, "copy_bytes_per_s": f"{found.copy_bytes_per_s / 1e9:.1f} GB/s"}
        pairs({name.removesuffix("_bytes_per_s"): value for name, value in shown.items()}, False)
        for rate in rates:
            print(
                f"{rate['dtype']:<24}{rate['flops_per_s'] / 1e9:,.0f} GFLOP/s, "
                f"ridge at {rate['ridge_flop_per_byte']:.1f} FLOP/byte"
            )


def described(file: Path | None) -> list[dict[str, Any]]:
    """The rules under the thresholds of `file` (or FXOPT_THRESHOLDS), with what is overridden: default -> value."""
    from fxopt.options import resolve_options
    from fxopt.rules import describe

    options = resolve_options({} if file is None else {"thresholds": file})
    table = []
    for rule, default in zip(describe(dict(options.thresholds)), describe(), strict=True):
        changed = {
            name: f"{default['thresholds'][name]:g} -> {value:g}"
            for name, value in rule["thresholds"].items()
            if value != default["thresholds"][name]
        }
        table.append({**rule, "overridden": changed})
    return table


def _words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return "; ".join(
            f"{name} = {item:g}" if isinstance(item, float) else f"{name} {item}" for name, item in value.items()
        )
    return ", ".join(value) if isinstance(value, list) else value


def _device(name: str | None) -> torch.device:
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(chosen)
    except RuntimeError:
        raise CliError(f"{chosen!r} is not a device: cpu, cuda and cuda:N are") from None
    if device.type not in ("cpu", "cuda"):
        raise CliError(f"fxopt measures on cpu and cuda, not on {device.type}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CliError(f"no {chosen} here: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def kept_ceilings(device: torch.device, measure: bool) -> tuple[Ceilings, Path | None]:
    """The ceilings and their file. Measures, and says so on stderr, where none are kept or `measure` asks for it."""
    import warnings

    from fxopt.options import resolve_options
    from profiler_core import roofline

    store = resolve_options({}).plan_root / "ceilings"
    file = roofline.kept_at(device, store)
    # What is kept and cannot be read is measured again, and says so in a warning of its own.
    measured = measure or not file.exists()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = roofline.ceilings(device, store, again=measure)
    for warning in caught:
        print(f"fxopt: warning: {warning.message}", file=sys.stderr)
    if measured:
        why = "" if measure else f", for none of this device were kept in {store}"
        print(f"fxopt: measured now{why}", file=sys.stderr)
    return found, file if file.exists() else None
