"""torch's operator database through the backend: each operator gives what it gives under plain Inductor.

Every operator that `torch.testing._internal.common_methods_invocations.op_db` has for float32 on the CPU is called with
its first sample input: by eager, by plain Inductor, and by fxopt in two ways, both of which use what the passes made of
a graph, faster or not:

- profile_guided: `torch.compile(op, backend="profile_guided")` in mode apply, with a plan that holds every registered
  pass that may run on the CPU at precision fp32, and after them two that write every result again, before and after
  Inductor's joint passes, so that every graph is rewritten;
- frozen: as `fxopt.optimize` compiles a module, the operator's tensors but its first argument being buffers, which are
  folded (where there are any); with the registered passes alone.

An operator is all right where both have plain Inductor's verdict against eager: the same within the operator's
tolerances for its tests on the CPU, different, or the error raised; and leave the random state as plain Inductor does.
One that draws random numbers must also give plain Inductor's numbers; of one that returns uninitialised memory only the
form is compared. A crash, or a call that takes longer than the deadline, is that operator's verdict. Dynamo is told to
capture operators whose results have sizes, or are numbers, that data decide.

    python tools/op_db.py --json results/cpu/op_db.json --rows op_db.jsonl       # goes on where the rows end
    python tools/op_db.py --rows op_db.jsonl --way frozen                        # one of the two ways
    python tools/op_db.py --shard 1/2 --rows op_db.jsonl                         # beside --shard 2/2, the same rows
    python tools/op_db.py --op nn.functional.linear --op add                     # some of them

Compiled code is cached in $TORCHINDUCTOR_CACHE_DIR, else in a folder that is thrown away. The tests that come with
torch need the package expecttest.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from op_db_calls import FXOPT, NOTHING_TO_FREEZE, PLAIN, serve

from profiler_core.files import write_atomically


class Worker:
    """A process that calls operators; a new one takes the place of one that died or was late."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        found = self._receive(max(self.deadline, 300.0))
        if isinstance(found, str):
            raise SystemExit(f"the worker that calls the operators did not start: it {found}")
        self.names, self.environment = found

    def _receive(self, seconds: float) -> Any:
        """What the worker sent, or how it ended."""
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
            how = f"took more than {seconds:g} s"
        except (EOFError, ConnectionError):
            self.process.join()
            how = f"ended with exit code {self.process.exitcode}"
        self.stop()
        return how

    def stop(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        """Once it has done what it was asked for."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(10.0)
        self.stop()

    def row(self, name: str, ways: Sequence[str] = FXOPT) -> dict[str, Any]:
        """The operator's row. Where a way ends the process, that is its verdict, and the others are tried anew."""
        started = time.perf_counter()
        left = [PLAIN, *ways]
        row: dict[str, Any] = {"op": name, "ways": {}}
        while left:
            self.connection.send((name, left))
            described = self._receive(self.deadline)
            if isinstance(described, str):
                row["eager"], left = described, []
                self._start()
                break
            row.update(described)
            while left:
                found = self._receive(self.deadline)
                way = left.pop(0)
                if isinstance(found, str):
                    row["ways"][way] = {"verdict": found, "why": "", "graphs": 0, "seconds": self.deadline}
                    self._start()
                    break
                row["ways"][way] = found
        row["seconds"] = round(time.perf_counter() - started, 2)
        row["problems"] = problems(row)
        return row


#: operators that torch compiles no more once an argument is constant, with its own option `freezing` as without fxopt
#: (a constant of one element is a number to Inductor, and these lowerings take tensors alone)
NOT_FROZEN_BY_TORCH = ("nn.functional.embedding", "tensor_split")


def problems(row: Mapping[str, Any]) -> list[str]:
    """Where fxopt does not do what plain Inductor does, a line each."""
    if PLAIN not in row["ways"]:
        return [f"eager {row['eager']}"]
    found = []
    plain = row["ways"][PLAIN]
    for way, own in row["ways"].items():
        if way == PLAIN or own["verdict"] == NOTHING_TO_FREEZE:
            continue
        if way == "frozen" and row["op"] in NOT_FROZEN_BY_TORCH and own["verdict"] == "raises LoweringException":
            continue
        if own["verdict"] != plain["verdict"]:
            why = own["why"] or plain["why"]
            found.append(f"{way}: {own['verdict']}, plain Inductor: {plain['verdict']}" + (f" ({why})" if why else ""))
        elif row["values"] == "random" and own.get("as_plain"):
            found.append(f"{way}: other random numbers than plain Inductor's: {own['as_plain']}")
        if not own.get("same_state", True):
            found.append(f"{way}: leaves another random state than plain Inductor")
    return found


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows by operator, the last of each; a line that was cut off is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["op"]] = row
    return found


def lacking(row: Mapping[str, Any] | None, ways: Sequence[str], retry: bool) -> list[str]:
    """The ways of `ways` in which the operator of `row` has still to be called: all, to retry one with problems."""
    if row is None or (retry and row["problems"]):
        return list(ways)
    return [way for way in ways if way not in row["ways"] and PLAIN in row["ways"]]


def joined(before: Mapping[str, Any] | None, row: dict[str, Any]) -> dict[str, Any]:
    """`row`, with the ways that only an earlier row of the operator has."""
    both = {**(before["ways"] if before is not None else {}), **row["ways"]}
    row["ways"] = {way: both[way] for way in (PLAIN, *FXOPT) if way in both}
    row["problems"] = problems(row)
    return row


def summary(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Numbers of operators: what there is, plain Inductor's verdicts, and each way's beside them."""
    run = [row for row in rows if PLAIN in row["ways"]]
    plain = Counter(row["ways"][PLAIN]["verdict"].partition(" ")[0] for row in run)
    found: dict[str, Any] = {
        "operators": len(names),
        "rows": len(rows),
        "no graph compiled": sum(not row["ways"][PLAIN]["graphs"] for row in run),
        "random": sum(row.get("values") == "random" for row in rows),
        "only the form compared": sum(row.get("values") == "form" for row in rows),
        "plain Inductor": dict(plain),
        "with problems": sum(bool(row["problems"]) for row in rows),
    }
    for way in FXOPT:
        beside = [(row["ways"][way], row["ways"][PLAIN]) for row in run if way in row["ways"]]
        beside = [(one, other) for one, other in beside if one["verdict"] != NOTHING_TO_FREEZE]
        own = [one for one, _ in beside]
        found[way] = {
            "run": len(own),
            "verdict of plain Inductor": sum(one["verdict"] == other["verdict"] for one, other in beside),
            "not frozen by torch": sum(own["verdict"] == "raises LoweringException" for own, _ in beside),
            "bit for bit plain Inductor's": sum(bool(one.get("same_bits")) for one in own),
            "graph left to plain Inductor": sum(bool(one.get("left")) for one in own),
            "rewritten": sum(bool(one.get("changed")) for one in own),
            "passes": dict(Counter(name for one in own for name in one.get("changed", {}))),
        }
    return found


def brief(own: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is empty."""
    return {name: value for name, value in own.items() if value or isinstance(value, (bool, int))}


def show(counts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    screen = Console(width=120)
    table = Table(box=box.SIMPLE)
    for column in ("", *FXOPT):
        table.add_column(column, justify="right" if column else "left")
    for name, value in counts[FXOPT[0]].items():
        if not isinstance(value, dict):
            table.add_row(name, *(str(counts[way][name]) for way in FXOPT))
    for name in sorted({name for way in FXOPT for name in counts[way]["passes"]}):
        table.add_row(f"  {name}", *(str(counts[way]["passes"].get(name, 0)) for way in FXOPT))
    screen.print(table)
    screen.print("; ".join(f"{name}: {value}" for name, value in counts.items() if name not in FXOPT), markup=False)
    for row in rows:
        for problem in row["problems"]:
            screen.print(f"{row['op']}: {problem}", markup=False, highlight=False)


def chosen(names: Sequence[str], ops: Sequence[str], count: int, shard: str) -> list[str]:
    """The operators to run: those asked for, or `count` at equal distances over the database (0: all); and of them the
    i-th of every n, where the shard is i/n.
    """
    if unknown := [name for name in ops if name not in names]:
        raise typer.BadParameter(f"no operator with float32 on the CPU is named {', '.join(unknown)}")
    wanted = list(ops) or [names[i * len(names) // count] for i in range(count)] or list(names)
    index, _, of = shard.partition("/")
    if not (index.isdigit() and of.isdigit() and 1 <= int(index) <= int(of)):
        raise typer.BadParameter(f"a shard is i/n, such as 1/2, not {shard!r}")
    return wanted[int(index) - 1 :: int(of)]


def main(
    op: list[str] = typer.Option([], help="an operator by full name; may be given again (else: all)"),
    count: int = typer.Option(0, "--sample", help="this many operators at equal distances over the database", min=0),
    shard: str = typer.Option("1/1", help="i/n: the i-th of every n operators"),
    rows: Path | None = typer.Option(None, help="JSON lines, to which each finished operator is added"),
    retry: bool = typer.Option(False, help="run those with problems again, which are in the rows"),
    way: list[str] = typer.Option(list(FXOPT), help="of fxopt's ways this one; may be given again"),
    deadline: float = typer.Option(600.0, help="seconds that a call may take, compiling included"),
    json_path: Path | None = typer.Option(None, "--json", help="write the rows that there are, and the environment"),
) -> None:
    """Calls torch's operators by eager, plain Inductor and fxopt. Exit code 1 where fxopt and plain Inductor differ."""
    if unknown := sorted(set(way) - set(FXOPT)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(FXOPT)}")
    own_cache = "" if os.environ.get("TORCHINDUCTOR_CACHE_DIR") else tempfile.mkdtemp(prefix="fxopt-op-db-cache-")
    if own_cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own_cache
    for name in [name for name in os.environ if name.startswith("FXOPT_")]:
        del os.environ[name]
    worker = Worker(deadline)
    try:
        known = read_rows(rows) if rows is not None else {}
        todo = chosen(worker.names, op, count, shard)
        mine = set(todo)
        left = {name: lacking(known.get(name), way, retry) for name in todo}
        todo = [name for name in todo if left[name]]
        for number, name in enumerate(todo, 1):
            row = known[name] = joined(known.get(name), worker.row(name, left[name]))
            if rows is not None:
                with rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            word = "; ".join(row["problems"]) or row["ways"][PLAIN]["verdict"]
            print(f"{number}/{len(todo)} {name} {row['seconds']:.1f} s: {word}", flush=True)
    finally:
        worker.end()
        shutil.rmtree(own_cache, ignore_errors=True)
    # Another shard may have added rows meanwhile.
    known = {**(read_rows(rows) if rows is not None else {}), **{name: known[name] for name in mine}}
    listed = [known[name] for name in worker.names if name in known]
    counts = summary(listed, worker.names)
    show(counts, listed)
    if json_path is not None:
        result = {
            "schema_version": 1,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "tools/op_db.py", *sys.argv[1:]]),
            "environment": worker.environment,
            "summary": counts,
            "rows": [{**row, "ways": {way: brief(own) for way, own in row["ways"].items()}} for row in listed],
        }
        write_atomically(json_path, json.dumps(result, indent=1) + "\n")
    if any(known[name]["problems"] for name in mine):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
