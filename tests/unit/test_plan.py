from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import threading
from enum import Enum
from pathlib import Path

import filelock
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxopt import machine, registry, verify
from fxopt import plan as plan_module
from fxopt.plan import (
    PLAN_SCHEMA,
    Machine,
    PassUse,
    Plan,
    PlanCorrupt,
    PlanNewer,
    PlanStore,
    PlanStoreError,
    parse_plan,
    plan_key,
)
from fxopt.plan_passes import PlanRefused, _as, passes_of
from fxopt.registry import PassContext

KEY = plan_key(graph="a linear layer", shapes=[[4, 8]])
OTHER = plan_key(graph="another")


def a_plan(key: str = KEY, **changes) -> Plan:
    values = {
        "key": key,
        "decision": "candidate",
        "passes": [PassUse(name="freeze_weights", options={"limit": 3}, stage="config")],
        "inductor": {"max_autotune": True},
        "verdict": {"ok": True, "rel_l2": 1e-7},
        "environment": {"torch": "2.13.0"},
        "tuning_seconds": 12.5,
        "calls_to_pay": 300.0,
        "memory_bytes": 1024,
        **changes,
    }
    return Plan(**values)


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "store", lock_timeout=5)


def spoil(store: PlanStore, content: str | bytes, key: str = KEY) -> Path:
    path = store.path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def edited(**changes) -> str:
    return json.dumps({**a_plan().model_dump(), **changes})


# --- keeping and finding ------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded(store):
    plan = a_plan()
    assert store.save(plan) == store.path(KEY)
    assert store.load(KEY) == plan


def test_a_missing_plan_is_none_and_creates_nothing(store):
    assert store.load(KEY) is None
    assert list(store.list()) == []
    assert not store.root.exists()


def test_saving_again_replaces(store):
    store.save(a_plan())
    store.save(a_plan(decision="baseline", passes=[]))
    loaded = store.load(KEY)
    assert loaded is not None and loaded.decision == "baseline" and loaded.passes == []
    assert len(store.list()) == 1


def test_the_file_is_json_that_a_person_can_read(store):
    text = store.save(a_plan()).read_text()
    assert json.loads(text)["schema_version"] == PLAN_SCHEMA
    assert '\n  "decision": "candidate",\n' in text
    assert text.endswith("}\n")


def test_saving_leaves_no_temporary_file_and_clears_those_of_writers_that_died(store):
    store.save(a_plan())
    left = store.plans_dir / f".{KEY}.json.1.dead.tmp"
    left.write_text("half a pl")
    store.save(a_plan())
    assert sorted(path.name for path in store.plans_dir.iterdir()) == [".lock", f"{KEY}.json"]


def test_tuples_are_kept_as_lists(store):
    store.save(a_plan(profile={"shape": (2, 3)}))
    loaded = store.load(KEY)
    assert loaded is not None and loaded.profile == {"shape": [2, 3]}


def test_the_listing_shows_the_newest_first_and_is_bounded(store):
    keys = [plan_key(n=n) for n in range(3)]
    for age, key in enumerate(keys):
        os.utime(store.save(a_plan(key)), (1000 + age, 1000 + age))
    assert [row.key for row in store.list()] == keys[::-1]
    assert [row.key for row in store.list(limit=2)] == keys[:0:-1]
    newest = store.list(limit=1)[0]
    assert (newest.decision, newest.passes, newest.problem) == ("candidate", ("freeze_weights",), "")
    assert newest.bytes == store.path(keys[-1]).stat().st_size


def test_the_listing_shows_broken_files_and_leaves_them_in_place(store):
    store.save(a_plan())
    path = spoil(store, "{", OTHER)
    rows = {row.key: row for row in store.list()}
    assert rows[KEY].problem == ""
    assert "line 1, column 2" in rows[OTHER].problem
    assert path.exists()


def test_the_listing_ignores_files_that_are_not_plans(store):
    store.save(a_plan())
    (store.plans_dir / "notes.json").write_text("{}")
    assert [row.key for row in store.list()] == [KEY]


def test_a_removed_plan_is_gone(store):
    store.save(a_plan())
    assert store.remove(KEY) is True
    assert store.load(KEY) is None
    assert store.remove(KEY) is False


@pytest.mark.parametrize(
    "key", ["", "../escape", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n", "a" * 64 + "/../x"]
)
def test_what_is_not_a_key_leads_nowhere(store, key):
    for use in (store.path, store.load, store.remove):
        with pytest.raises(ValueError, match="is not a plan key"):
            use(key)
    with pytest.raises(ValueError):
        a_plan(key)


# --- broken files -------------------------------------------------------------------------------------------

BROKEN = {
    "empty": ("", "line 1, column 1"),
    "cut off": (edited()[:-40], "the file is cut off"),
    "cut off in a text": (edited().split("candid")[0], "the file is cut off"),
    "not JSON": ('{\n  "key": oops\n}', "line 2, column 10"),
    "not UTF-8": (b'{"key": "\xff"}', "byte 9"),
    "not an object": ("[1, 2]", "a JSON object was expected, not a list"),
    "no version": (json.dumps({"key": KEY}), "field schema_version"),
    "an older version": (edited(schema_version=0), "field schema_version"),
    "version as text": (edited(schema_version="1"), "field schema_version"),
    "version true": (edited(schema_version=True), "field schema_version"),
    "another key": (edited(key=OTHER), "field key"),
    "an unknown field": (edited(extra=1), "field extra"),
    "an unknown decision": (edited(decision="perhaps"), "field decision"),
    "text for a flag": (edited(freeze="yes"), "field freeze"),
    "a wrong nested field": (edited(passes=[{"name": "a", "stage": "joint"}, {}]), "field passes[1].name"),
    "a negative time": (edited(tuning_seconds=-1), "field tuning_seconds"),
    "NaN": (edited(profile={"wall_ns": math.nan}), "the value NaN"),
    "a number past the range": (edited(profile={"ns": "BIG"}).replace('"BIG"', "1e999"), "plan.profile.ns"),
    "an integer without end": (edited(memory_bytes="BIG").replace('"BIG"', "9" * 9999), "a number"),
    "nested without end": ("[" * 200_000, "nested too deeply"),
    "nested deeply": (edited(labels="D").replace('"D"', "[" * 90 + "]" * 90), "nested too deeply"),
    "larger than any plan": (b" " * (plan_module.MAX_PLAN_BYTES + 1), "larger than any plan"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_place_and_remedy_and_set_aside(store, case):
    content, place = BROKEN[case]
    path = spoil(store, content)
    before = path.read_bytes()
    with pytest.raises(PlanCorrupt) as refusal:
        store.load(KEY)
    error = refusal.value
    assert error.file == path and str(path) in str(error)
    assert place in str(error)
    assert "set aside as" in str(error) and "writes a new plan" in str(error)
    assert error.set_aside is not None and error.set_aside.read_bytes() == before
    assert not path.exists()
    assert store.load(KEY) is None  # and the next run starts anew
    store.save(a_plan())
    assert store.load(KEY) is not None


def test_each_broken_file_is_kept_under_a_number_of_its_own(store):
    names = []
    for content in ("one", "two", "three"):
        spoil(store, content)
        with pytest.raises(PlanCorrupt) as refusal:
            store.load(KEY)
        aside = refusal.value.set_aside
        assert aside is not None
        names.append((aside.name, aside.read_text()))
    assert names == [(f"{KEY}.json.corrupt.{n}", text) for n, text in enumerate(("one", "two", "three"), 1)]


def test_a_broken_file_that_cannot_be_set_aside_says_so_and_stays(store):
    path = spoil(store, "{")
    store.lock_timeout = 0.05
    with (
        filelock.FileLock(store.plans_dir / ".lock"),
        pytest.raises(PlanCorrupt, match="remove it by hand") as refusal,
    ):
        store.load(KEY)
    assert refusal.value.set_aside is None
    assert path.read_text() == "{"


def test_a_good_plan_that_replaced_the_broken_one_meanwhile_is_not_set_aside(store, monkeypatch):
    spoil(store, "{")
    parse = plan_module._parse

    def replaced_while_parsing(content, key, path):
        store.save(a_plan())
        return parse(content, key, path)

    monkeypatch.setattr(plan_module, "_parse", replaced_while_parsing)
    with pytest.raises(PlanCorrupt):
        store.load(KEY)
    monkeypatch.undo()
    assert store.load(KEY) is not None


def test_the_plan_of_a_newer_fxopt_is_refused_and_stays(store):
    path = spoil(store, edited(schema_version=PLAN_SCHEMA + 1, something_new=True))
    with pytest.raises(PlanNewer, match="upgrade fxopt") as refusal:
        store.load(KEY)
    assert str(path) in str(refusal.value)
    assert path.exists()


def test_a_pickle_in_a_plans_place_is_not_run(store, tmp_path):
    import pickle

    class Mine:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    spoil(store, pickle.dumps(Mine()))
    with pytest.raises(PlanCorrupt):
        store.load(KEY)
    assert not (tmp_path / "ran").exists()


# --- a store that cannot be used ----------------------------------------------------------------------------


def test_a_root_that_is_a_file_is_named_with_the_remedy(tmp_path):
    root = tmp_path / "file"
    root.write_text("")
    store = PlanStore(root)
    for use in (lambda: store.save(a_plan()), lambda: store.load(KEY), store.list):
        with pytest.raises(PlanStoreError) as refusal:
            use()
        assert str(root) in str(refusal.value) and "FXOPT_PLAN_DIR" in str(refusal.value)


def test_a_failed_write_leaves_the_earlier_plan_and_no_litter(store, monkeypatch):
    store.save(a_plan())

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanStoreError, match="No space left on device"):
        store.save(a_plan(decision="baseline"))
    monkeypatch.undo()
    loaded = store.load(KEY)
    assert loaded is not None and loaded.decision == "candidate"
    assert sorted(path.name for path in store.plans_dir.iterdir()) == [".lock", f"{KEY}.json"]


def test_a_store_locked_by_another_is_named_after_the_wait(store):
    store.save(a_plan())
    store.lock_timeout = 0.05
    with filelock.FileLock(store.plans_dir / ".lock"):
        with pytest.raises(PlanStoreError, match=r"stayed locked by another process for 0\.05 s"):
            store.save(a_plan(OTHER))
        assert store.load(KEY) is not None  # readers need no lock


def test_after_an_error_the_lock_is_free_again(store, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(PlanStoreError, match="Input/output error"):
        store.save(a_plan())
    monkeypatch.undo()
    store.lock_timeout = 0.05
    store.save(a_plan())


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"profile": {"wall": [1.0, math.nan]}}, r"plan\.profile\.wall\[1\] is nan"),
        ({"inductor": {"pass": object()}}, r"plan\.inductor\.pass is a object"),
        ({"environment": {3: "x"}}, None),
        ({"labels": [{"nodes": {"a"}}]}, r"plan\.labels\[0\]\.nodes is a set"),
    ],
)
def test_what_json_cannot_carry_is_refused_by_its_place(store, changes, place):
    # pydantic itself refuses a name that is not a string.
    with pytest.raises(PlanStoreError if place else ValueError, match=place):
        store.save(a_plan(**changes))
    assert not store.path(KEY).exists()


def test_a_plan_too_large_to_read_back_is_not_written(store, monkeypatch):
    monkeypatch.setattr(plan_module, "MAX_PLAN_BYTES", 1000)
    with pytest.raises(PlanStoreError, match="keep a summary of the profile"):
        store.save(a_plan(profile={"text": "x" * 1000}))
    assert not store.path(KEY).exists()


# --- several at once ----------------------------------------------------------------------------------------


def test_threads_that_write_the_same_plan_do_not_disturb_each_other(store):
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(5):
                PlanStore(store.root, lock_timeout=30).save(a_plan(tuning_seconds=number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    loaded = store.load(KEY)
    assert loaded is not None and loaded.tuning_seconds in range(4)


def test_processes_that_write_and_read_the_same_plan_see_whole_plans_only(store):
    # Each plan carries a long text of one letter: a reader that saw parts of two would see two letters.
    script = textwrap.dedent(
        """
        import sys
        from fxopt.plan import Plan, PlanStore

        store, key, letter = PlanStore(sys.argv[1], lock_timeout=60), sys.argv[2], sys.argv[3]
        read = 0
        for _ in range(25):
            store.save(Plan(key=key, decision="baseline", profile={"text": letter * 50_000}))
            seen = store.load(key)
            assert seen is not None
            assert len(set(seen.profile["text"])) == 1 and len(seen.profile["text"]) == 50_000
            read += 1
        print(read)
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(plan_module.__file__).parents[1])}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(store.root), KEY, letter],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for letter in "abc"
    ]  # fmt: skip
    for worker in workers:
        out, err = worker.communicate()
        assert (worker.returncode, out.strip()) == (0, "25"), err
    assert sorted(path.name for path in store.plans_dir.iterdir()) == [".lock", f"{KEY}.json"]


# --- keys ---------------------------------------------------------------------------------------------------


class Colour(str, Enum):
    RED = "red"


def test_a_key_does_not_depend_on_the_order_of_names():
    assert plan_key(a=1, b={"x": 1, "y": 2}) == plan_key(b={"y": 2, "x": 1}, a=1)


def test_a_key_depends_on_the_order_of_a_list():
    assert plan_key(shapes=[1, 2]) != plan_key(shapes=[2, 1])


def test_a_key_is_the_same_in_another_process_and_version():
    # Over the text {"a":[1,2.5,null,true],"b":"x"}: a change here makes every plan on disk unfindable.
    assert plan_key(b="x", a=(1, 2.5, None, True)) == (
        "eb68bad33141c1838809b2db65164deeb826e79de5b49b20fa63966595e28b01"
    )


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (True, 1), (None, "null"), ([], {}), ("1", 1), (0.0, -0.0)]
)
def test_values_of_different_types_give_different_keys(one, other):
    assert plan_key(part=one) != plan_key(part=other)


def test_an_enum_member_counts_as_its_value():
    assert plan_key(colour=Colour.RED) == plan_key(colour="red")


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"shapes": [1, 2, {3}]}, r"parts\.part\.shapes\[2\] is a set"),
        ({"a": {1: 2}}, r"parts\.part\.a has 1 \(int\) as a name"),
        ([math.inf], r"parts\.part\[0\] is inf"),
        (math.nan, r"parts\.part is nan"),
        (b"bytes", r"parts\.part is a bytes"),
        (Path("x"), r"parts\.part is a \w*Path"),
    ],
)
def test_a_key_of_what_json_cannot_carry_is_refused_by_its_place(part, place):
    with pytest.raises(TypeError, match=place):
        plan_key(part=part)


def test_a_structure_that_holds_itself_is_refused():
    itself: list = []
    itself.append(itself)
    with pytest.raises(TypeError, match="nested too deeply"):
        plan_key(part=itself)


def test_a_number_of_a_library_is_refused_rather_than_written_in_some_way():
    import numpy as np

    for number in (np.float64(0.5), np.int64(3), np.bool_(True)):
        with pytest.raises(TypeError, match=r"parts\.part is a "):
            plan_key(part=number)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,  # at most ten deep
)


@given(JSON_VALUES)
def test_any_json_value_has_a_key_and_the_same_one_after_a_round_trip(value):
    key = plan_key(part=value)
    assert len(key) == 64
    assert plan_key(part=json.loads(json.dumps(value))) == key


@given(st.binary(max_size=200))
def test_no_content_of_a_file_gets_through_but_as_a_plan_or_a_named_error(tmp_path_factory, content):
    store = PlanStore(tmp_path_factory.mktemp("store"))
    spoil(store, content)
    with pytest.raises(PlanStoreError, match=KEY):
        store.load(KEY)


# --- size, machines, and plans of others ------------------------------------------------------------------


def used(path: Path, seconds_ago: float) -> None:
    when = path.stat().st_mtime_ns - int(seconds_ago * 1e9)
    os.utime(path, ns=(when, when))


def test_the_store_keeps_to_its_bound_and_what_was_used_longest_ago_goes(tmp_path):
    size = len(a_plan().content())
    store = PlanStore(tmp_path, max_bytes=int(3.5 * size))
    keys = [plan_key(n=n) for n in range(3)]
    for age, key in zip((30, 20, 10), keys, strict=True):
        used(store.save(a_plan(key)), age)
    store.load(keys[0])  # which is a use
    store.save(a_plan(KEY))
    assert {row.key for row in store.list()} == {keys[0], keys[2], KEY}


def test_what_lies_beside_the_plans_counts_and_goes_too_and_ceilings_stay(tmp_path):
    store = PlanStore(tmp_path, max_bytes=5000)
    files = {}
    for folder in ("provenance", "reports", "measured", "ceilings"):
        path = files[folder] = tmp_path / folder / "a.json"
        path.parent.mkdir()
        path.write_text("x" * 4000)
        used(path, 60)
    store.save(a_plan())
    assert [name for name, path in files.items() if path.exists()] == ["ceilings"]
    assert store.load(KEY) is not None


def test_a_plan_larger_than_the_bound_is_kept_alone(tmp_path):
    store = PlanStore(tmp_path, max_bytes=10)
    store.save(a_plan(OTHER))
    store.save(a_plan())
    assert [row.key for row in store.list()] == [KEY]


def test_the_listing_is_by_writing_not_by_use(store):
    for age, key in ((20, KEY), (10, OTHER)):
        used(store.save(a_plan(key)), age)
    store.load(KEY)
    assert [row.key for row in store.list()] == [OTHER, KEY]


def test_the_digest_is_of_what_is_decided_not_of_where_it_was_verified():
    here = a_plan(machines=[Machine(host="here")])
    assert here.digest() == a_plan(created=here.created).digest()
    assert here.digest() != a_plan(created=here.created, freeze=True).digest()


def test_a_message_that_holds_no_plan_is_named():
    assert parse_plan(a_plan().content(), KEY, "a message").passes == a_plan().passes
    for content in (b"\x80\x04.", b"{", b"[]", json.dumps({"schema_version": 1}).encode()):
        with pytest.raises(PlanStoreError, match="a message holds no plan: "):
            parse_plan(content, KEY, "a message")


@pytest.mark.parametrize(
    ("mine", "other", "same"),
    [
        (("a", []), ("a", []), True),
        (("a", []), ("b", []), False),
        (("a", ["g1"]), ("a", ["g1", "g2"]), True),
        (("a", ["g1"]), ("a", ["g2"]), False),
        (("b", ["g1"]), ("a", ["g1"]), False),
    ],
)
def test_a_machine_is_a_host_and_its_gpus(mine, other, same):
    (host, gpus), (other_host, other_gpus) = mine, other
    assert machine.known(Machine(host=host, gpus=gpus), [Machine(host=other_host, gpus=other_gpus)]) is same
    assert not machine.known(Machine(host=host, gpus=gpus), [])


def test_a_plan_names_no_machine_in_the_clear():
    import platform

    here = machine.machine(torch.device("cpu"))
    assert here == machine.machine(torch.device("cpu"))
    assert platform.node() not in here.host and len(here.host) == 16


CONTEXT = PassContext(torch.device("cpu"), verify.parse_precision("fp32"))


def refused(use: dict, match: str, context: PassContext = CONTEXT) -> None:
    allowed = registry.select(["causal_mask", "promote_matmul_precision", "pad_matmul"], ())
    with pytest.raises(PlanRefused, match=match) as error:
        passes_of(a_plan(passes=[use]), allowed, context)
    assert "Nothing of it was used" in str(error.value) and KEY[:12] in str(error.value)


def test_a_plan_may_use_only_what_the_caller_allows():
    refused({"name": "os.system", "stage": "joint"}, r"passes\[0\]: 'os.system' is not a pass that may run here")
    refused({"name": "freeze_weights", "stage": "config"}, "'freeze_weights' is not a pass that may run here")
    refused({"name": "causal_mask", "stage": "runtime"}, "has the stage joint, not 'runtime'")
    refused({"name": "promote_matmul_precision", "stage": "joint"}, "needs precision='bf16'")


@pytest.mark.parametrize("value", ["__import__('os').system('true')", [1], {"a": 1}, 1.5, True, None])
def test_an_option_is_a_plain_value_of_its_defaults_type(value):
    refused({"name": "causal_mask", "stage": "joint", "options": {"max_bytes": value}}, "the option 'max_bytes' is")


def test_an_option_that_the_pass_lacks_is_refused_and_a_right_one_is_taken():
    refused({"name": "causal_mask", "stage": "joint", "options": {"__class__": "x"}}, "no option is named '__class__'")
    use = {"name": "causal_mask", "stage": "joint", "options": {"max_bytes": 7}}
    (made,) = passes_of(a_plan(passes=[use]), registry.select(["causal_mask"], ()), CONTEXT)
    assert made.options()["max_bytes"] == 7


def test_lists_become_tuples_and_a_pass_stands_once():
    assert _as([1, [2, 3]], (), "name") == (1, (2, 3))
    assert _as([1], None, "name") == (1,) and _as(2, 1.0, "name") == 2
    use = {"name": "causal_mask", "stage": "joint"}
    with pytest.raises(PlanRefused, match=r"passes\[1\]"):
        passes_of(a_plan(passes=[use, use]), registry.select(["causal_mask"], ()), CONTEXT)


def test_what_only_some_plans_have_is_left_out_of_the_others_which_an_older_fxopt_can_read():
    plain = json.loads(a_plan().content())
    assert not {"resting", "to_come"} & set(plain)
    rests = {"name": "pad_matmul", "options": {}, "stage": "joint"}
    assert json.loads(a_plan(resting=[rests]).content())["resting"] == [rests]
