"""`fxopt doctor`: what this machine can measure, each gap with its remedy."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

_SIGNS = {"yes": "ok", "no": "--", "broken": "!!"}


def add_commands(app: typer.Typer) -> None:
    import typer

    @app.command("doctor", short_help="What this machine can measure, and what it lacks.")
    def doctor(
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        quiet: bool = typer.Option(False, "--quiet", "-q", help="Print the gaps alone."),
    ) -> None:
        """What this machine can measure: torch, GPU, counters, clocks, nsys and ncu, compiler. Each gap has its remedy.

        Run it first on a new machine. A gap is no failure: without a GPU, profiles hold the operators of the CPU;
        without permission for counters, labels rest on times and modelled work. The exit code is 1 only where nothing
        at all can be measured.

        Example: fxopt doctor

        Example: fxopt doctor --json

        Next: fxopt profile SCRIPT
        """
        from fxopt.cli_run import quiet_kineto
        from fxopt.doctor import examine, usable

        quiet_kineto()
        findings = examine()
        if as_json:
            print(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            for finding in findings:
                if quiet and finding.state == "yes":
                    continue
                print(f"{_SIGNS[finding.state]}  {finding.what}: {finding.found}")
                if finding.remedy:
                    print(f"      remedy: {finding.remedy}")
        if not usable(findings):
            print("fxopt: error: nothing can be measured here; the lines with !! say why", file=sys.stderr)
            raise typer.Exit(1)
