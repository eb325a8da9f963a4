"""Fingerprints: another text for whatever decides what a pass does, and the same one in every process."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import textwrap
import threading
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxopt import fingerprints
from fxopt.fingerprints import UnstableError, canonical
from fxopt.registry import GraphPass, RegistryError, Stage

CELL = """
    import functools
    import threading
    from dataclasses import dataclass
    from fxopt.registry import GraphPass, Stage

    FACTOR = 1
    TABLE = {"a": [1, 2]}
    UNRELATED = 1
    LOCK = threading.Lock()

    def deepest(x): return x + 1
    def helper(x, scale=1): return deepest(x) * scale
    @functools.lru_cache
    def cached(x): return x * 10

    class Tool:
        size = 1
        def use(self): return self.size + 1

    def enclosing(inner):
        def decorated(self): return inner
        return decorated

    @dataclass(frozen=True)
    class Mine(GraphPass):
        name = "mine"
        stage = Stage.JOINT
        LIMIT = 3

        enclosed = enclosing(5)

        @staticmethod
        def fixed(k=7): return k

        @property
        def double(self): return 2

        def rewrite(self, graph, node, context, k=4, *, j=6):
            with LOCK:
                return [FACTOR * k for _ in helper(TABLE)], cached(1), Tool().use(), super().rewrite
"""


def in_a_notebook(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The fingerprint of the pass that a cell defines, in a module that has no file."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(textwrap.dedent(text), "<cell>", "exec"), module.__dict__)
    return module.Mine().fingerprint()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 1", "FACTOR = 2"),
        ('{"a": [1, 2]}', '{"a": [1, 3]}'),
        ("LIMIT = 3", "LIMIT = 4"),
        ("enclosing(5)", "enclosing(6)"),
        ("k=7", "k=8"),
        ("k=4", "k=5"),
        ("j=6", "j=7"),
        ("return 2", "return 3"),
        ("scale=1", "scale=2"),
        ("x + 1", "x + 2"),
        ("x * 10", "x * 11"),
        ("size = 1", "size = 2"),
        ("self.size + 1", "self.size + 2"),
    ],
    ids=[
        "a global number",
        "a global table",
        "a class attribute",
        "an enclosed variable",
        "a static method's default",
        "a default",
        "a keyword's default",
        "a property",
        "a helper's default",
        "a helper's helper",
        "a cached helper",
        "a helper class's attribute",
        "a helper class's method",
    ],
)
def test_whatever_a_notebook_pass_rests_on_makes_its_fingerprint(old, new, monkeypatch):
    assert CELL.count(old) == 1
    before = in_a_notebook(CELL, monkeypatch)
    assert in_a_notebook(CELL.replace(old, new), monkeypatch) != before == in_a_notebook(CELL, monkeypatch)


def test_what_a_notebook_pass_never_reads_does_not(monkeypatch):
    edited = CELL.replace("UNRELATED = 1", "UNRELATED = 2") + "\n    graph = k = {'something': 'else'}\n"
    assert in_a_notebook(edited, monkeypatch) == in_a_notebook(CELL, monkeypatch)


@pytest.mark.parametrize("imports", ["from fp_beside_a_notebook import fuse", "import fp_beside_a_notebook as fuse"])
def test_a_file_that_a_notebook_imports_makes_the_fingerprint(imports, tmp_path, monkeypatch):
    cell = CELL.replace("FACTOR = 1", f"{imports}\n    FACTOR = 1").replace("helper(TABLE)", "fuse(TABLE)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = set()
    for value in (1, 2):
        (tmp_path / "fp_beside_a_notebook.py").write_text(f"VALUE = {value}\ndef fuse(x): return VALUE\n")
        monkeypatch.delitem(sys.modules, "fp_beside_a_notebook", raising=False)
        found.add(in_a_notebook(cell, monkeypatch))
    monkeypatch.delitem(sys.modules, "fp_beside_a_notebook")
    assert len(found) == 2


def test_classes_that_one_function_makes_of_different_values_differ():
    def make(factor: int, limit: int) -> GraphPass:
        @dataclass(frozen=True)
        class Made(GraphPass):
            name = "made"
            stage = Stage.JOINT
            LIMIT = limit

            def finish(self, graph, context):
                return factor

        return Made()

    assert make(1, 1).fingerprint() == make(1, 1).fingerprint()
    assert len({make(1, 1).fingerprint(), make(2, 1).fingerprint(), make(1, 2).fingerprint()}) == 3


# -- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    size: int = 1


@dataclass(frozen=True)
class Blocks:
    size: int = 1


def edited(values: torch.Tensor) -> torch.Tensor:
    copied = values.clone()
    copied.view(-1)[copied.numel() // 2] = 7
    return copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_a_tensor_counts_by_type_shape_and_every_byte(dtype):
    values = torch.zeros(100, 50, dtype=dtype)
    assert canonical(values) == canonical(values.clone())
    texts = {canonical(one) for one in (values, edited(values), values.t(), values.reshape(-1), values[:0])}
    assert len(texts) == 5
    assert canonical(torch.zeros(3, dtype=torch.int32)) != canonical(torch.zeros(3))
    assert canonical(torch.ones(2, 2).numpy()) != canonical(torch.ones(4).numpy())
    assert canonical(torch.zeros(5000).numpy()) != canonical(edited(torch.zeros(5000)).numpy())
    assert canonical(torch.nn.Parameter(torch.ones(()))) == canonical(torch.ones(()))


def test_a_tensor_without_bytes_is_no_option():
    with pytest.raises(UnstableError, match="the bytes of a Tensor cannot be read"):
        canonical(torch.ones(3, device="meta"))


def test_functions_count_by_name_and_by_what_they_run():
    def scaled(factor: int) -> Any:
        return lambda x: x * factor

    different = [lambda x: x + 1, lambda x: x + 2, scaled(1), scaled(2), torch.relu, torch.nn.functional.gelu]
    different += [functools.partial(scaled(1), 3), functools.partial(scaled(1), 4), Tiles(1).__eq__, Tiles(2).__eq__]
    texts = [canonical(one) for one in different]
    assert len(set(texts)) == len(texts)
    assert not any("0x" in text for text in texts)
    assert canonical(scaled(1)) == canonical(scaled(1))


def test_classes_and_keys_of_one_content_differ():
    assert canonical(Tiles()) != canonical(Blocks())
    assert canonical({1: "a"}) != canonical({"1": "a"})
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})


def test_an_option_that_is_written_with_an_address_is_refused_by_name():
    @dataclass(frozen=True)
    class Holder(GraphPass):
        name = "holder"
        stage = Stage.JOINT
        lock: Any = 0
        tables: Any = field(default_factory=dict)

    assert Holder().fingerprint()
    for found in (Holder(lock=threading.Lock()), Holder(lock=[object()]), Holder(lock={object(): 1})):
        with pytest.raises(RegistryError, match=r"Holder: the option `lock` .*address.*give it a __repr__ without"):
            found.fingerprint()
    with pytest.raises(RegistryError, match=r"Holder: the option `tables` "):
        replace(Holder(), tables={"a": object()}).fingerprint()


def test_fingerprints_are_the_same_in_every_process(tmp_path):
    """Whatever order sets come in, and wherever objects lie."""
    script = textwrap.dedent(CELL) + textwrap.dedent("""
        import torch
        from fxopt.fingerprints import canonical
        print(Mine().fingerprint())
        print(canonical([lambda x: x in {"a", "b", "c"}, helper, cached, Tool, torch.relu, functools.partial(helper)]))
        print(canonical(frozenset({torch.float32, torch.float16, "x", 1, helper, deepest, Tool})))
        print(canonical({helper: torch.arange(9), torch.ops.aten.mm.default: {"u", "v", "w"}}))
    """)
    (tmp_path / "script.py").write_text(script)

    def run(seed: str, command: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        call = [sys.executable, command]
        return subprocess.run(
            call, input=script, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout

    for command in ("-", "script.py"):  # without a file, and with one
        assert run("1", command) == run("2", command) != ""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a.b, c as d", {"a.b", "c"}),
        ("def f():\n    from p.q import (  # (both)\n        r,\n        s,\n    )", {"p.q", "p.q.r", "p.q.s"}),
        ("from a import b, \\\n    c", {"a", "a.b", "a.c"}),
        ("if True: import a", {"a"}),
        ("x = 1; import a", {"a"}),
        ("try: from a import b\nexcept ImportError: pass", {"a", "a.b"}),
        ("from . import near\nfrom ..far import x", {"top.p", "top.p.near", "top.far", "top.far.x"}),
        ('"""\nfrom .... import nothing\n"""\nimport a', {"a"}),
        ("import a\nimport b and more", set()),
        ("from a import *", {"a", "a.*"}),
    ],
)
def test_imports_are_found_wherever_they_are(text, names):
    assert set(fingerprints._imports(text.encode(), "top.p")) == names


def test_the_short_way_finds_every_import_of_every_module_of_this_project():
    for path in (Path(__file__).parents[2] / "fxopt").rglob("*.py"):
        text = path.read_bytes()
        kinds = (ast.Import, ast.ImportFrom)
        whole = {ast.dump(n) for n in fingerprints._statements(ast.parse(text)) if isinstance(n, kinds)}
        short = {ast.dump(n) for n in fingerprints._import_statements(text) if isinstance(n, kinds)}
        assert whole <= short, path
