"""Ranges of modules and source lines, and what operators outside of compiled graphs get of them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import profiler_core
from profiler_core.attribute.engine import attribute
from profiler_core.collect.kineto_window import _BEGINS, _ENDS, _RETURNED, _with_calls
from profiler_core.collect.module_calls import ModulePaths, watching
from profiler_core.collect.source_lines import LineRanges
from profiler_core.range_names import line_name, line_of, module_name, module_of
from profiler_core.trace import Op, Trace


@settings(deadline=None)
@given(st.text(), st.text(min_size=1))
@example("h.0.attn", "Linear")
@example("a\ud800", "A class")
@example("x" * 5_000, "Linear")
def test_a_modules_range_tells_path_and_class(path, kind):
    """In characters that a profiler's JSON leaves alone, whatever the names."""
    name = module_name(path, kind)
    assert module_of(name) == (path, kind)
    assert name.isascii() and name.isprintable() and not set(name) & set('"\\')


def test_a_range_reads_as_what_it_names():
    assert module_name("h.0.a b[0]'s", "Linear") == "nn.Module: Linear h.0.a b[0]'s"
    assert line_name("/a/b c.py", 3) == "source line: /a/b c.py:3"
    assert module_of("nn.Module: Linear h.0.up") == ("h.0.up", "Linear")
    assert module_of("aten::mm") == module_of(line_name("a.py", 3)) == ("", "")


@pytest.mark.parametrize("file", ["train.py", "/a:b/c.py", "C:\\x.py", '/josé/"a"\n%20.py'])
def test_a_lines_range_tells_file_and_number(file):
    assert line_of(line_name(file, 12)) == (file, 12)
    assert line_of("aten::mm") == line_of("source line: x") == line_of("source line: x:-1") == ("", 0)


def cpu(*ops: Op) -> Trace:
    return Trace.of(ops, (), device_type="cpu", iterations=1)


def placed(trace: Trace) -> dict[str, tuple[str, str, int]]:
    profile = attribute(trace, eager_nodes=True)
    assert profile.attributed_ns == profile.total_ns
    return {row["node"]: (row["module_path"], row["target"], row["line"]) for row in profile.nodes.to_dict("records")}


def test_an_operator_is_of_the_innermost_module_and_line():
    trace = cpu(
        Op(module_name("", "Net"), 1, 0, 100),
        Op(line_name("net.py", 5), 1, 1, 60),
        Op(module_name("up", "Linear"), 1, 2, 50),
        Op("aten::linear", 1, 3, 40),
        Op("aten::addmm", 1, 4, 30),
        Op(line_name("net.py", 6), 1, 61, 90),
        Op("aten::linear", 1, 62, 80),
        Op("aten::relu", 2, 3, 40),
    )
    assert placed(trace) == {
        "aten::linear@up:5": ("up", "aten::linear", 5),
        "aten::linear@net.py:6": ("", "aten::linear", 6),
        "aten::relu": ("", "aten::relu", 0),  # on a thread without such ranges
    }


def test_an_operator_of_a_backward_pass_is_of_the_place_of_its_forward_operator():
    trace = cpu(
        Op(module_name("up", "Linear"), 1, 0, 50),
        Op("aten::empty", 1, 1, 5),  # records no step, and carries the number of the next
        Op("aten::addmm", 1, 10, 40),
        Op(line_name("train.py", 9), 1, 60, 100),
        Op("autograd::engine::evaluate_function: AddmmBackward0", 1, 61, 90),
        Op("aten::mm", 1, 62, 80),
        Op("aten::ones_like", 1, 91, 95),
    )
    sequences = {1: 7, 10: 7, 61: 7, 62: -1, 91: 12}
    trace.ranges["sequence"] = [sequences.get(start, -1) for start in trace.ranges["start_ns"]]
    found = placed(trace)
    assert found["aten::mm@up backward"] == ("up", "aten::mm", 0)
    assert found["aten::ones_like@train.py:9"] == ("", "aten::ones_like", 9)


def test_two_files_of_one_name_are_two_nodes():
    trace = cpu(
        Op(line_name("a/net.py", 5), 1, 0, 10),
        Op("aten::relu", 1, 1, 9),
        Op(line_name("b/net.py", 5), 1, 20, 30),
        Op("aten::relu", 1, 21, 29),
    )
    profile = attribute(trace, eager_nodes=True)
    assert dict(zip(profile.nodes["node"], profile.nodes["file"], strict=True)) == {
        "aten::relu@net.py:5": "a/net.py",
        "aten::relu@net.py:5 #2": "b/net.py",
    }


def test_calls_reach_from_mark_to_mark_and_what_comes_after_is_left_out():
    def marks(*last: Op) -> Trace:
        return cpu(
            Op("epoch", 1, 1, 39, category="user_annotation"),  # begun in the first call, around them both
            Op(_BEGINS, 1, 2, 3),
            Op("aten::mm", 1, 5, 9),
            Op(_RETURNED, 1, 10, 11),
            Op("aten::relu", 1, 12, 14),
            Op(_BEGINS, 1, 20, 21),
            Op("aten::mm", 1, 22, 25),
            Op(_RETURNED, 1, 26, 27),
            *last,
        )

    def kernels(trace: Trace) -> list[tuple[str, int]]:
        found = attribute(_all_threads(_with_calls(trace)), eager_nodes=True).kernels
        return list(zip(found["name"], found["iteration"], strict=True))

    first = [("aten::mm", 0), ("aten::relu", 0), ("aten::mm", 1)]
    assert kernels(marks(Op("aten::sum", 1, 30, 33))) == first
    assert kernels(marks(Op("aten::sum", 1, 30, 33), Op(_ENDS, 1, 34, 35))) == [*first, ("aten::sum", 1)]


def _all_threads(trace: Trace) -> Trace:
    trace.meta["all_threads"] = True
    return trace


class Noting:
    idle = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def called(self, call):
        self.seen.append(type(call.subject).__name__)
        return call()


def test_every_call_of_a_module_is_seen_and_torch_compile_traces_nothing_of_it(fresh_dynamo):
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(2)
    graphs = []

    def keep(gm, inputs):
        graphs.append([node.meta["stack_trace"] for node in gm.graph.nodes if node.op == "call_function"])
        return gm.forward

    watcher = Noting()
    with watching(watcher):
        model(x)
        assert watcher.seen == ["Sequential", "Linear", "ReLU"]
        compiled = torch.compile(model, backend=keep, fullgraph=True)
        watcher.seen.clear()
        compiled(x)
        assert watcher.seen == ["OptimizedModule"]
        watcher.idle = True
        model(x)
        assert watcher.seen == ["OptimizedModule"]
    model(x)
    compiled(x)
    assert watcher.seen == ["OptimizedModule"] and len(graphs) == 1  # nothing is compiled again afterwards
    assert not any("profiler_core" in trace.rpartition("File")[2] for trace in graphs[0])


def test_paths_are_those_of_the_model_without_what_is_put_around_it():
    model = nn.Sequential(nn.ModuleDict({"up": nn.Linear(2, 2)}), nn.ReLU())
    paths, around = ModulePaths(), torch.compile(model, backend="eager")
    assert paths.path(model[0]["up"], model) == "0.up" and paths.path(model, model) == ""
    assert paths.path(model[1], around) == "1"
    model.append(nn.Tanh())
    assert paths.path(model[2], model) == "2"
    assert paths.path(nn.Sigmoid(), model) == "Sigmoid"


def traced(function) -> list[tuple[str, int]]:
    """Lines that have a range while the function runs."""
    ranges = LineRanges()
    with torch.profiler.profile() as profiler:
        assert ranges.start()
        try:
            function()
        finally:
            ranges.stop()
    found = [line_of(event.name) for event in sorted(profiler.events(), key=lambda event: event.time_range.start)]
    return [(file, line) for file, line in found if file]


def test_the_users_lines_have_ranges_and_torchs_do_not():
    layer = nn.Linear(2, 2)

    def function():
        x = torch.ones(2)
        return layer(x)

    first = function.__code__.co_firstlineno
    found = traced(function)
    assert [line for file, line in found if file == __file__ and line in (first + 1, first + 2)] == [
        first + 1,
        first + 2,
    ]
    torchs = str(Path(torch.__file__).parent)
    assert not any(file.startswith((torchs, str(Path(profiler_core.__file__).parent))) for file, _ in found)
    assert sys.gettrace() is None


def test_what_runs_the_program_has_no_lines(tmp_path):
    """Not the frames of a tool, nor those that called the tool."""
    file = tmp_path / "tool.py"
    file.write_text("def run(function):\n    function()\n")
    tool = {}
    exec(compile(file.read_text(), str(file), "exec"), tool)

    def started(*skip: str) -> list[str]:
        ranges, found = LineRanges(skip), []

        def function():
            assert ranges.start()
            found.extend(ranges.active)
            ranges.stop()

        tool["run"](function)
        return [frame.file for frame in found]

    assert started()[-3:] == [__file__, str(file), __file__]
    assert started(str(tmp_path)) == [__file__]  # of `function` alone


def test_ranges_stay_nested_through_errors_and_generators():
    def numbers():
        yield 0
        yield 1

    def function():
        for _ in numbers():
            try:
                raise ValueError
            except ValueError:
                torch.ones(2)

    ranges = LineRanges()
    assert ranges.start()
    try:
        function()
    finally:
        ranges.stop()
    assert ranges.active == []


def test_a_debugger_keeps_its_trace_function():
    def trace(frame, event, argument):
        return None

    ranges = LineRanges()
    done = []

    def under_a_debugger():
        sys.settrace(trace)
        done.append(ranges.start())
        done.append(sys.gettrace() is trace)
        sys.settrace(None)

    thread = threading.Thread(target=under_a_debugger)
    thread.start()
    thread.join()
    assert done == [False, True]
