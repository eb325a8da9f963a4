"""Passes: what one must declare, how they are found, and in which order they run."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fxopt import fingerprints, registry
from fxopt.labels import Axis
from fxopt.registry import ConfigPass, GraphPass, PassContext, PassReport, RegistryError, RuntimePass, Stage
from fxopt.verify import Precision, parse_precision


def make(name: str, stage: Stage = Stage.JOINT, after: tuple[str, ...] = (), before: tuple[str, ...] = ()):
    namespace = {"name": name, "stage": stage, "after": after, "before": before, "__module__": __name__}
    return dataclass(frozen=True)(type(name, (GraphPass,), namespace))()


def names(passes):
    return [p.name for p in passes]


def test_stages_come_in_order_and_names_break_ties():
    passes = [make("z", Stage.CONFIG), make("b"), make("a"), make("r", Stage.RUNTIME)]
    assert names(registry.order(passes)) == ["z", "a", "b", "r"]


def test_constraints_are_kept():
    assert names(registry.order([make("a", after=("b",)), make("b"), make("c", before=("b",))])) == ["c", "b", "a"]


def test_a_constraint_on_an_absent_pass_is_no_constraint():
    assert names(registry.order([make("a", after=("missing",))])) == ["a"]


def test_a_cycle_is_named():
    with pytest.raises(RegistryError, match=r"cycle: a -> b -> a .*take one of these constraints out"):
        registry.order([make("a", after=("b",)), make("b", after=("a",)), make("c")])
    with pytest.raises(RegistryError, match="cycle: b -> d -> c -> b "):  # whatever hangs on to it
        b, c, d = make("b", after=("d",)), make("c", after=("b",), before=("d",)), make("d")
        registry.order([make("a", after=("b",)), b, c, d])
    with pytest.raises(RegistryError, match="cycle: a -> a "):
        registry.order([make("a", after=("a",))])


def test_a_constraint_against_the_stages_is_refused():
    with pytest.raises(RegistryError, match=r"early .*must come after late"):
        registry.order([make("early", after=("late",)), make("late", Stage.RUNTIME)])


def declared(kind: type = GraphPass, fields: dict[str, Any] | None = None, **attributes: Any) -> type:
    attributes = {"name": "declared", "stage": Stage.JOINT, "precision": Precision.FP32, **attributes}
    namespace = {key: value for key, value in attributes.items() if value is not None}
    return dataclass(frozen=True)(type("Declared", (kind,), {"__annotations__": fields or {}, **namespace}))


def fails(self):
    raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: declared(name=None), "Declared: a pass needs a class attribute `name`"),
        (lambda: declared(stage=None), "Declared: `stage` must be one of Stage.JOINT, Stage.POST_GRAD"),
        (lambda: declared(stage="joint_graph"), "Declared: `stage` must be one of"),
        (lambda: declared(stage=Stage.CONFIG), "Declared: `stage` must be one of Stage.JOINT, Stage.POST_GRAD"),
        (lambda: declared(ConfigPass), "Declared: `stage` must be one of Stage.CONFIG"),
        (lambda: declared(RuntimePass), "Declared: `stage` must be one of Stage.RUNTIME"),
        (lambda: declared(precision=None), "Declared: `precision` must say what it needs"),
        (lambda: declared(fields={"block": "int"}), "Declared: the option `block` needs a default"),
        (lambda: type("Plain", (GraphPass,), {"name": "plain"}), "Plain: a pass must be a frozen dataclass"),
        (lambda: declared(stage="joint"), "Declared: `stage` must be one of Stage.JOINT, .*not 'joint'"),
        (lambda: declared(precision="fp32"), "Declared: `precision` must .*one of Precision.FP32, .*not 'fp32'"),
        (lambda: declared(name=3), "Declared: `name` is 3; write a string of letters"),
        (lambda: declared(name="a,b"), "Declared: `name` is 'a,b'; write"),
        (lambda: declared(name="all"), "Declared: `name` is 'all'; write .* not 'all'"),
        (lambda: declared(answers=Axis.MEMORY_BOUND), r"is the axis .*write frozenset\({Axis.MEMORY_BOUND}\)"),
        (lambda: declared(answers="memory_bound"), "Declared: `answers` is 'memory_bound'; write a frozenset of axes"),
        (lambda: declared(answers={"memory_bound"}), "holds 'memory_bound', which is no Axis; write Axis.MEMORY_BOUND"),
        (lambda: declared(answers=("Axis.MEMORY_BOND",)), "holds 'Axis.MEMORY_BOND', .*; write Axis.MEMORY_BOUND"),
        (lambda: declared(answers=[3]), "`answers` holds 3, which is no Axis; write one of Axis.LAUNCH_BOUND, "),
        (lambda: declared(after="other"), r"Declared: `after` is the string 'other'; write the tuple \('other',\)"),
        (lambda: declared(before="other"), "Declared: `before` is the string"),
        (lambda: declared(enables="other"), "Declared: `enables` is the string"),
        (lambda: declared(needs="other"), "Declared: `needs` is the string"),
        (lambda: declared(conflicts="other"), r"Declared: `conflicts` is the string .*write the tuple \('other',\)"),
        (lambda: declared(conflicts=("declared",)), "Declared: `conflicts` holds the pass's own name, 'declared'"),
        (lambda: declared(conflicts=("x",), needs=("x",)), "Declared: 'x' is in `needs` and in `conflicts`; take it"),
        (lambda: declared(needs=(GraphPass,)), "Declared: `needs` holds <class .*write a tuple of strings"),
        (lambda: declared(enables=3), "Declared: `enables` is 3; write a tuple of strings"),
        (lambda: declared(devices="cpu"), "Declared: `devices` is the string"),
        (lambda: declared(devices=("gpu",)), "Declared: `devices` holds 'gpu'; the devices are cpu, cuda"),
        (lambda: declared(after=("declared",)), "Declared: `after` holds the pass's own name, 'declared'; take it out"),
        (lambda: declared(before=("declared",)), "Declared: `before` holds the pass's own name"),
        (lambda: declared(__post_init__=fails), r"Declared: Declared\(\) raised RuntimeError: no licence; .*defaults"),
        (
            lambda: declared(fields={"kernel": "object"}, kernel=object()),
            "Declared: the option `kernel` cannot be part of a key: .*give it a __repr__ without an address",
        ),
        (lambda: dataclass(type("Loose", (), {"name": "x"})), "Loose: a pass is a class derived from GraphPass"),
        (lambda: registry, "module 'fxopt.registry'.*: a pass is a class derived from"),
    ],
    ids=[
        "no name",
        "no stage",
        "no such stage",
        "a stage of another kind",
        "a config pass elsewhere",
        "a runtime pass elsewhere",
        "no precision",
        "an option without default",
        "no dataclass",
        "a stage in words",
        "a precision in words",
        "a number for a name",
        "a comma in the name",
        "the name of all",
        "one axis",
        "an axis in words",
        "axes in words",
        "an axis misspelt",
        "a number for an axis",
        "after without a comma",
        "before without a comma",
        "enables without a comma",
        "needs without a comma",
        "conflicts without a comma",
        "a conflict with itself",
        "a conflict with what it needs",
        "needs of classes",
        "enables of nothing",
        "devices without a comma",
        "no such device",
        "after itself",
        "before itself",
        "it cannot be made",
        "an option with an address",
        "no pass",
        "no class",
    ],
)
def test_what_a_pass_lacks_is_said_when_it_is_registered(made, message):
    with pytest.raises(RegistryError, match=message):
        registry.register(made())
    assert "declared" not in registry._registered


def test_whatever_holds_axes_and_names_is_taken():
    for kind in (set, frozenset, tuple, list):
        cls = declared(answers=kind([Axis.MEMORY_BOUND]), after=kind(["other"]), devices=kind(["cuda"]))
        try:
            assert registry.register(cls) is cls
        finally:
            registry.unregister("declared")


def test_two_passes_of_one_name_are_refused():
    @dataclass(frozen=True)
    class One(GraphPass):
        name: ClassVar[str] = "same_name"
        stage: ClassVar[Stage] = Stage.JOINT
        precision: ClassVar[Precision] = Precision.FP32

    @dataclass(frozen=True)
    class Two(One):
        pass

    registry.register(One)
    try:
        registry.register(One)
        with pytest.raises(RegistryError, match=r"two passes are named 'same_name': .*One and .*Two; rename one"):
            registry.register(Two)
    finally:
        registry.unregister("same_name")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RegistryError, match=r"no pass is named 'nope'.*cuda_graphs"):
        registry.select(["nope"], [])
    with pytest.raises(RegistryError, match="no pass is named 'nope'; known"):
        registry.select(None, ["nope"])


def test_an_unknown_name_suggests_those_that_it_may_stand_for():
    with pytest.raises(RegistryError, match="no pass is named 'cuda_graph'; did you mean 'cuda_graphs'"):
        registry.select(["cuda_graph"], [])


def test_a_pass_that_cannot_say_whether_it_applies_gives_that_as_the_reason():
    def raises(self, context):
        raise ValueError("no such field")

    p = declared(applicable=raises)()
    assert registry.inapplicable(p, None) == "its applicable() raised ValueError: no such field"
    assert registry.inapplicable(declared(applicable=lambda self, context: "no")(), None) == "no"


def test_with_gradients_a_pass_applies_that_says_so():
    trains = PassContext(device=torch.device("cpu"), budget=parse_precision("fp32"), grad=True)
    assert "gradients are on" in registry.inapplicable(declared()(), trains)
    assert registry.inapplicable(declared(gradients=True)(), trains) == ""


def test_a_conflict_is_one_whichever_of_the_two_declares_it():
    one, other = declared(conflicts=("else",))(), declared(name="else")()
    assert registry.in_conflict(one, other) and registry.in_conflict(other, one)
    assert not registry.in_conflict(one, declared(name="third")())


def test_variants_are_the_pass_itself_where_it_says_nothing():
    p = declared()()
    assert registry.variants(p, None) == [p]


def test_each_variant_comes_once_in_the_order_of_the_pass():
    def three(self, context):
        return [type(self)(size=size) for size in (2, 1, 2)]

    cls = declared(fields={"size": "int"}, size=1, variants=three)
    assert registry.variants(cls(), None) == [cls(size=2), cls(size=1)]


@pytest.mark.parametrize("given", [(), ("declared",), (declared()(),)], ids=["nothing", "names", "another class"])
def test_variants_that_are_none_are_refused(given):
    with pytest.raises(RegistryError, match=r"declared: variants\(\) gave .*; give "):
        registry.variants(declared(variants=lambda self, context: given)(), None)


# -- entry points -----------------------------------------------------------------------------------------------------


class Points:
    """Entry points beside fxopt's own, as importlib.metadata gives them."""

    def __init__(self, monkeypatch):
        self.own = list(importlib.metadata.entry_points(group=registry.ENTRY_POINT_GROUP))
        self.more: list[importlib.metadata.EntryPoint] = []
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [*self.own, *self.more])
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    def add(self, name: str, value: str) -> None:
        self.more.append(importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINT_GROUP))


@pytest.fixture
def points(monkeypatch):
    return Points(monkeypatch)


Installed = declared(name="installed")
Usurper = declared(name="cuda_graphs")
Usurper.__qualname__ = "Usurper"


def test_the_name_that_counts_is_the_one_that_the_class_declares(points):
    points.add("my-package-pass", f"{__name__}:Installed")
    known = registry.discover()
    assert known["installed"] is Installed and "my-package-pass" not in known
    assert registry.discover() == known
    assert "installed" in names(registry.select(None, []))


def test_a_broken_entry_point_is_named_and_the_others_are_there(points):
    points.add("absent", "no_such_module:Pass")
    points.add("half", f"{__name__}:no_such_attribute")
    points.add("odd", f"{__name__}:names")
    points.add("installed", f"{__name__}:Installed")
    with pytest.warns(UserWarning) as said:
        known = registry.discover()
    assert {"installed", "cuda_graphs", "freeze_weights"} <= set(known)
    messages = [str(one.message) for one in said]
    assert len(messages) == 3
    for message, words in zip(messages, ("absent", "half", "odd"), strict=True):
        assert f"the pass '{words}' ({'no_such_module' if words == 'absent' else __name__}" in message


Unmade = declared(name="unmade", __post_init__=fails)


def test_an_entry_point_whose_pass_cannot_be_made_leaves_the_others(points):
    points.add("unmade", f"{__name__}:Unmade")
    points.add("installed", f"{__name__}:Installed")
    with pytest.warns(UserWarning, match=r"'unmade' .*cannot be loaded: Declared: .*RuntimeError: no licence"):
        chosen = registry.select(None, [])
    assert {"installed", "cuda_graphs"} <= set(names(chosen)) and "unmade" not in names(chosen)


def test_a_pass_that_can_no_longer_be_made_is_left_out(points):
    broken: list[bool] = []

    def sometimes(self):
        if broken:
            raise RuntimeError("no licence")

    registry.register(declared(name="moody", __post_init__=sometimes))
    assert "moody" in names(registry.select(None, []))
    broken.append(True)
    with pytest.warns(UserWarning, match="the pass 'moody' is left out: RuntimeError: no licence"):
        chosen = registry.select(None, [])
    assert "cuda_graphs" in names(chosen) and "moody" not in names(chosen)


def test_a_name_that_is_taken_is_refused_naming_both(points):
    points.add("cuda_graphs", f"{__name__}:Usurper")
    both = r"two passes are named 'cuda_graphs': passes\.cuda_graphs\.CudaGraphs and .*Usurper"
    with pytest.warns(UserWarning, match=both):
        known = registry.discover()
    assert known["cuda_graphs"].__name__ == "CudaGraphs"


# -- passes asked for by name -----------------------------------------------------------------------------------------


def test_of_passes_asked_for_by_name_no_other_is_loaded(points, monkeypatch):
    points.add("absent", "no_such_module:Pass")  # of which `discover` would warn
    points.add("installed", f"{__name__}:Installed")
    monkeypatch.setattr(registry, "_registered", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(registry.select(["installed", "cuda_graphs"], [])) == ["installed", "cuda_graphs"]
        assert names(registry.select(["installed", "cuda_graphs"], ["cuda_graphs"])) == ["installed"]
        assert set(registry._registered) == {"installed", "cuda_graphs"}
        assert registry.select([], []) == []


def test_a_pass_asked_for_is_found_whatever_its_entry_point_is_called(points):
    points.add("my-package-pass", f"{__name__}:Installed")
    assert names(registry.select(["installed"], [])) == ["installed"]
    with pytest.raises(RegistryError, match="no pass is named 'my-package-pass'"):
        registry.select(["my-package-pass"], [])


def test_a_pass_that_was_registered_is_found_without_an_entry_point(points):
    registry.register(declared(name="by_hand"))
    assert names(registry.select(["by_hand"], [])) == ["by_hand"]


def test_an_entry_point_that_is_asked_for_and_broken_is_named(points):
    points.add("half", f"{__name__}:no_such_attribute")
    with (
        pytest.warns(UserWarning, match="the pass 'half' .* cannot be loaded"),
        pytest.raises(RegistryError, match="no pass is named 'half'"),
    ):
        registry.select(["half"], [])


def test_of_two_entry_points_of_the_name_asked_for_the_first_counts_and_the_other_is_named(points):
    points.add("cuda_graphs", f"{__name__}:Usurper")
    with pytest.warns(UserWarning, match="two passes are named 'cuda_graphs'"):
        (chosen,) = registry.select(["cuda_graphs"], [])
    assert type(chosen).__name__ == "CudaGraphs"


# -- fingerprints -----------------------------------------------------------------------------------------------------


def test_the_built_in_passes_are_found_and_ordered():
    built_in = [
        *("freeze_weights", "bf16_graph", "inductor_options", "rnn_redispatch"),  # config
        *("causal_mask", "merge_projections", "split_precision_attention", "split_precision_conv", "channels_last"),
        *("promote_matmul_precision", "attention_backend", "split_precision_gemm"),  # joint, after those above
        *("onednn_linear", "pad_matmul", "gemm_epilogue", "remove_redundant_casts_and_copies"),  # post-grad
        *("cudnn_algorithm", "tf32_matmul", "cuda_graphs"),  # runtime
    ]
    assert names(registry.select(None, [])) == built_in
    assert names(registry.select(None, ["cuda_graphs"])) == built_in[:-1]


def test_options_make_the_fingerprint():
    @dataclass(frozen=True)
    class Tunable(GraphPass):
        name: ClassVar[str] = "tunable"
        stage: ClassVar[Stage] = Stage.JOINT
        block: int = 4
        axes: frozenset[str] = frozenset()

    assert Tunable().fingerprint() == Tunable(4).fingerprint() != Tunable(8).fingerprint()
    assert Tunable(8).options() == {"block": 8, "axes": frozenset()}
    many = [frozenset(map(str, numbers)) for numbers in (range(50), reversed(range(50)))]
    assert Tunable(axes=many[0]).fingerprint() == Tunable(axes=many[1]).fingerprint() != Tunable().fingerprint()


PASS = """
    from dataclasses import dataclass
    from fxopt.precision import Precision
    from fxopt.registry import GraphPass, Stage
    {imports}

    @dataclass(frozen=True)
    class Mine({base}):
        name = "mine"
        stage = Stage.JOINT
        precision = Precision.FP32

        def rewrite(self, graph, node, context):
            {lazily}
"""


class Site:
    """A folder of modules, of which those that a pass is made of are told from the rest by editing them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.syspath_prepend(str(root))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    def write_pass(self, path: str, imports: str = "", base: str = "GraphPass", lazily: str = "pass") -> None:
        self.write(path, PASS.format(imports=imports, base=base, lazily=lazily))

    def fingerprint(self, module: str) -> str:
        """In a process that has imported nothing of this yet."""
        for name, loaded in list(sys.modules.items()):
            if str(self.root) in str(getattr(loaded, "__file__", None)):
                del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module(module).Mine().fingerprint()

    def follows(self, module: str, path: str) -> bool:
        """Whether editing the file at `path` makes another fingerprint."""
        before = self.fingerprint(module)
        assert self.fingerprint(module) == before
        file = self.root / path
        text = file.read_text()
        file.write_text(text + "\n# edited\n")
        after = self.fingerprint(module)
        file.write_text(text)
        assert self.fingerprint(module) == before
        return after != before


@pytest.fixture
def site(tmp_path, monkeypatch):
    made = Site(tmp_path, monkeypatch)
    yield made
    for name, loaded in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(loaded, "__file__", None)):
            del sys.modules[name]


def test_the_pass_own_file_makes_the_fingerprint(site):
    site.write_pass("fp_alone.py")
    assert site.follows("fp_alone", "fp_alone.py")


@pytest.mark.parametrize(
    ("imports", "lazily"),
    [
        ("from fp_pkg.tools.helper import fuse", "pass"),
        ("from fp_pkg.tools import helper", "pass"),
        ("import fp_pkg.tools.helper", "pass"),
        ("from .tools import helper", "pass"),
        ("from .tools.helper import *", "pass"),
        ("", "from fp_pkg.tools.helper import fuse"),
    ],
    ids=["name", "module", "dotted", "relative", "star", "inside a function"],
)
def test_a_helper_module_makes_it_however_it_is_imported(site, imports, lazily):
    site.write("fp_pkg/__init__.py", "")
    site.write("fp_pkg/tools/__init__.py", "")
    site.write("fp_pkg/tools/helper.py", "from fp_pkg import deeper\ndef fuse(): return deeper.VALUE\n")
    site.write("fp_pkg/deeper.py", "VALUE = 1\n")
    site.write("fp_pkg/unrelated.py", "VALUE = 1\n")
    site.write_pass("fp_pkg/mine.py", imports, lazily=lazily)
    assert site.follows("fp_pkg.mine", "fp_pkg/mine.py")
    assert site.follows("fp_pkg.mine", "fp_pkg/tools/helper.py")
    assert site.follows("fp_pkg.mine", "fp_pkg/deeper.py")
    assert not site.follows("fp_pkg.mine", "fp_pkg/unrelated.py")


def test_a_base_class_elsewhere_makes_it_with_its_own_helpers(site):
    site.write("fp_base/__init__.py", "")
    common = "from fxopt.registry import GraphPass\nfrom . import parts\nclass Common(GraphPass): pass\n"
    site.write("fp_base/common.py", common)
    site.write("fp_base/parts.py", "X = 1\n")
    site.write("fp_user/__init__.py", "")
    site.write_pass("fp_user/mine.py", "from fp_base.common import Common", "Common")
    assert site.follows("fp_user.mine", "fp_base/common.py")
    assert site.follows("fp_user.mine", "fp_base/parts.py")


def test_a_file_beside_a_script_makes_it_and_a_neighbour_in_site_packages_does_not(tmp_path, monkeypatch):
    for folder, followed in (("scripts", True), ("site-packages", False)):
        with monkeypatch.context() as patched:
            site = Site(tmp_path / folder, patched)
            site.write("fp_beside.py", "X = 1\n")
            site.write_pass("fp_script.py", "import fp_beside")
            assert site.follows("fp_script", "fp_beside.py") is followed


def test_what_is_saved_while_a_process_runs_is_not_what_it_runs(site):
    """Else the code that runs would be kept under the name of the code that was saved."""
    site.write("fp_pkg2/__init__.py", "")
    site.write("fp_pkg2/helper.py", "X = 1\n")
    site.write_pass("fp_pkg2/mine.py", "from . import helper")
    before = site.fingerprint("fp_pkg2.mine")
    site.write("fp_pkg2/helper.py", "X = 2\n")
    module = sys.modules["fp_pkg2.mine"]
    assert module.Mine().fingerprint() == before
    importlib.reload(sys.modules["fp_pkg2.helper"])
    assert module.Mine().fingerprint() != before


def test_a_pass_without_a_file_has_its_code_for_a_fingerprint(tmp_path):
    """As in a notebook; and it is the same in another process, whatever order sets come in."""
    script = """
        import sys
        sys.modules["__main__"].__dict__.pop("__file__", None)
        from dataclasses import dataclass
        from fxopt.registry import GraphPass, Stage
        def helper(x): return x in {"a", "b", "c", "d"}, CONSTANT
        @dataclass(frozen=True)
        class Mine(GraphPass):
            name = "mine"
            stage = Stage.JOINT
            def rewrite(self, graph, node, context): return helper(CONSTANT)
        print(Mine().fingerprint())
    """

    def fingerprint(constant: str, seed: str) -> str:
        text = textwrap.dedent(script).replace("CONSTANT", constant)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-"]
        return subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=True).stdout

    assert fingerprint("1", "1") == fingerprint("1", "2") != fingerprint("2", "1")


def test_a_report_survives_json():
    report = PassReport("p", "joint", 3, 2, (("mm", "why"),), True, "")
    assert PassReport.from_json(report.to_json()) == report
    full = PassReport("p", "joint", 1, 1, (), True, "", created=3, erased=2, seconds=0.5)
    read = PassReport.from_json(full.to_json())
    assert read == full and read.seconds == 0.5


def test_a_report_from_before_there_was_a_field_and_after_it_is_gone_is_read():
    old = {"name": "p", "stage": "joint", "matched": 1, "rewritten": 1, "refused": [["a", "b"]], "changed": True}
    assert PassReport.from_json({**old, "something": 1}) == PassReport("p", "joint", 1, 1, (("a", "b"),), True)


@pytest.mark.parametrize("asked", [None, ["mine"]], ids=["all", "by name"])
def test_an_edited_pass_of_an_entry_point_has_another_fingerprint(asked, site, points):
    site.write_pass("warm_edited.py")
    points.add("mine", "warm_edited:Mine")

    def selected() -> str:
        site.fingerprint("warm_edited")  # loads it anew
        with fingerprints.once():
            (mine,) = (p for p in registry.select(asked, []) if p.name == "mine")
            assert mine.fingerprint() == mine.fingerprint()
        return mine.fingerprint()

    before = selected()
    assert selected() == before
    site.write_pass("warm_edited.py", lazily="return None")
    assert selected() != before


def test_within_once_a_class_is_looked_at_once_and_afterwards_anew():
    @dataclass(frozen=True)
    class Changing(declared()):
        LIMIT = 1

    p = Changing()
    with fingerprints.once():
        first = p.fingerprint()
        with fingerprints.once():
            assert p.fingerprint() == first
        Changing.LIMIT = 2
        assert p.fingerprint() == first
    assert p.fingerprint() != first
