from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fxopt.options import (
    Mode,
    OptionError,
    Options,
    UnknownOption,
    describe_options,
    environment_variable,
    option_names,
    resolve_options,
    split_options,
)
from fxopt.warning import FxoptWarning

KEYS = {"freezing", "max_autotune", "triton.cudagraphs", "cpp.threads", "epilogue_fusion"}
MODES = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
}


def split(mode=None, options=None, environ=None, **keywords):
    return split_options(mode, options, KEYS, MODES, environ=environ or {}, **keywords)


# --- whose option it is -------------------------------------------------------------------------------------


def test_nothing_given_means_the_defaults_and_tuning():
    options, mode, patches = split()
    assert options == Options()
    assert (options.precision, options.objective, options.on_error) == ("fp32", "wall", "fallback")
    assert mode is Mode.TUNE
    assert patches == {}


def test_own_options_and_inductors_are_told_apart():
    options, _, patches = split(options={"pairs": 12, "max_autotune": True, "triton.cudagraphs": False})
    assert options.pairs == 12
    assert patches == {"max_autotune": True, "triton.cudagraphs": False}


def test_hyphens_and_underscores_are_the_same_in_both():
    options, _, patches = split(options={"time-limit": 5, "epilogue-fusion": False})
    assert options.time_limit == 5.0
    assert patches == {"epilogue_fusion": False}


def test_a_prefix_says_whose_a_shared_name_is():
    keys = {"verbose"}
    plain = split_options(None, {"verbose": True}, keys, {}, environ={})
    ours = split_options(None, {"fxopt.verbose": True}, keys, {}, environ={})
    theirs = split_options(None, {"inductor.verbose": 7}, keys, {}, environ={})
    assert (plain[0].verbose, plain[2]) == (True, {})
    assert (ours[0].verbose, ours[2]) == (True, {})
    assert (theirs[0].verbose, theirs[2]) == (False, {"verbose": 7})


def test_a_prefix_does_not_make_an_unknown_name_known():
    with pytest.raises(UnknownOption, match=r"'fxopt\.max_autotune'"):
        split(options={"fxopt.max_autotune": True})
    with pytest.raises(UnknownOption, match=r"'inductor\.pairs'"):
        split(options={"inductor.pairs": 10})


def test_one_option_in_two_spellings_is_refused():
    with pytest.raises(OptionError, match=r"'pairs' and 'fxopt\.pairs' are the same"):
        split(options={"pairs": 10, "fxopt.pairs": 20})
    with pytest.raises(OptionError, match="'max_autotune' and 'max-autotune' are the same"):
        split(options={"max_autotune": True, "max-autotune": False})


def test_an_unknown_option_is_refused_with_the_nearest_and_the_list():
    with pytest.raises(UnknownOption) as refusal:
        split(options={"precison": "bf16"})
    message = str(refusal.value)
    assert "unknown option 'precison'; did you mean 'precision'?" in message
    assert all(name in message for name in option_names())
    assert "freeze" not in message  # no use to who calls torch.compile


def test_the_nearest_may_be_one_of_inductors():
    with pytest.raises(UnknownOption, match=r"did you mean 'max_autotune'\?"):
        split(options={"max_autotun": True})


def test_without_anything_near_no_suggestion_is_made():
    with pytest.raises(UnknownOption) as refusal:
        split(options={"zzzzzzzzzz": 1})
    assert "did you mean" not in str(refusal.value)


def test_an_option_needs_a_string_for_a_name():
    with pytest.raises(OptionError, match="a name is needed, not int"):
        split(options={3: True})


# --- mode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "option", "environment"])
def test_apply_can_be_asked_for_in_three_places(how):
    # torch.compile takes mode or options, never both, so options has to carry a mode too.
    _, mode, patches = split(
        mode="apply" if how == "argument" else None,
        options={"mode": "apply"} if how == "option" else None,
        environ={"FXOPT_MODE": "apply"} if how == "environment" else None,
    )
    assert mode is Mode.APPLY
    assert patches == {}


def test_a_mode_of_inductor_becomes_its_patches_and_tunes():
    _, mode, patches = split(mode="max-autotune")
    assert mode is Mode.TUNE
    assert patches == MODES["max-autotune"]


def test_a_given_patch_wins_over_the_modes():
    _, _, patches = split(mode="max-autotune", options={"triton.cudagraphs": False})
    assert patches == {"max_autotune": True, "triton.cudagraphs": False}


def test_the_inductor_modes_that_were_handed_in_are_not_changed():
    split(mode="max-autotune", options={"max_autotune": False})
    assert MODES["max-autotune"] == {"max_autotune": True, "triton.cudagraphs": True}


def test_a_mode_of_inductor_leaves_the_environment_to_say_whether_to_measure():
    _, mode, patches = split(mode="reduce-overhead", environ={"FXOPT_MODE": "apply"})
    assert mode is Mode.APPLY
    assert patches == {"triton.cudagraphs": True}


def test_a_stated_mode_wins_over_the_environment():
    assert split(mode="tune", environ={"FXOPT_MODE": "apply"})[1] is Mode.TUNE


def test_two_different_modes_are_refused():
    with pytest.raises(OptionError, match="'apply' by the argument mode and 'tune' by option 'mode'"):
        split(mode="apply", options={"mode": "tune"})


@pytest.mark.parametrize("value", ["fast", "", 3])
def test_an_unknown_mode_is_refused_with_the_choices(value):
    with pytest.raises(OptionError) as refusal:
        split(mode=value)
    message = str(refusal.value)
    assert repr(value) in message and "argument mode" in message
    assert all(choice in message for choice in ("tune", "apply", "reduce-overhead", "max-autotune"))


def test_an_unknown_mode_in_the_environment_names_the_variable():
    with pytest.raises(OptionError, match="'quick', from environment variable FXOPT_MODE"):
        split(environ={"FXOPT_MODE": "quick"})


# --- values -------------------------------------------------------------------------------------------------


def test_what_is_given_wins_over_the_environment_which_wins_over_the_default():
    environ = {"FXOPT_PAIRS": "40", "FXOPT_WARMUP": "9"}
    options, _, _ = split(options={"pairs": 8}, environ=environ)
    assert (options.pairs, options.warmup, options.iterations) == (8, 9, 5)


def test_an_empty_environment_variable_is_not_set():
    assert split(environ={"FXOPT_PAIRS": " ", "FXOPT_PRECISION": ""})[0] == Options()


def test_the_environment_of_the_process_is_read_where_none_is_handed_in(monkeypatch):
    monkeypatch.setenv("FXOPT_OBJECTIVE", "kernel")
    assert resolve_options({}).objective == "kernel"


ENVIRONMENT_VALUES = {
    "precision": ("1e-4", 1e-4),
    "objective": ("kernel", "kernel"),
    "passes": ("freeze_weights, cuda_graphs", ("freeze_weights", "cuda_graphs")),
    "disable": ("cuda_graphs", ("cuda_graphs",)),
    "plan_dir": ("plans/here", Path("plans/here")),
    "plan_limit": ("1024", 1024),
    "distributed": ("off", "off"),
    "distributed_timeout": ("1.5", 1.5),
    "pairs": ("7", 7),
    "time_limit": ("2.5", 2.5),
    "warmup": ("0", 0),
    "iterations": ("1", 1),
    "verify_inputs": ("4", 4),
    "logits": ("yes", True),
    "on_error": ("raise", "raise"),
    "report": ("report.json", Path("report.json")),
    "verbose": ("1", True),
    "counters": ("quick", "quick"),
    "dump": ("graphs", Path("graphs")),
    "memory_limit": ("20 %", "20%"),
    "ablate": ("yes", True),
    "bisect": ("3", 3),
}


def test_every_option_but_the_sessions_has_an_environment_variable():
    assert set(ENVIRONMENT_VALUES) == set(option_names()) - {"mode", "thresholds"}  # a file: see below
    environ = {environment_variable(name): text for name, (text, _) in ENVIRONMENT_VALUES.items()}
    options = resolve_options({}, environ=environ)
    assert {name: getattr(options, name) for name in ENVIRONMENT_VALUES} == {
        name: value for name, (_, value) in ENVIRONMENT_VALUES.items()
    }


BAD_VALUES = [
    ("precision", "fp64"),
    ("precision", 0),
    ("precision", 1.0),
    ("precision", math.nan),
    ("precision", True),
    ("precision", None),
    ("objective", "latency"),
    ("passes", ["a", 3]),
    ("passes", ["a", "a"]),
    ("passes", 5),
    ("disable", None),
    ("disable", [""]),
    ("plan_dir", 5),
    ("plan_limit", "20%"),
    ("plan_limit", -1),
    ("distributed", "on"),
    ("distributed_timeout", 0),
    ("pairs", 5),
    ("pairs", 7.5),
    ("pairs", True),
    ("pairs", "many"),
    ("time_limit", 0),
    ("time_limit", math.inf),
    ("time_limit", math.nan),
    ("warmup", -1),
    ("iterations", 0),
    ("verify_inputs", -1),
    ("logits", "perhaps"),
    ("on_error", "ignore"),
    ("report", 1.5),
    ("verbose", "loud"),
    ("memory_limit", -1),
    ("memory_limit", 1.5),
    ("memory_limit", True),
    ("memory_limit", "120%"),
    ("memory_limit", "nan%"),
    ("memory_limit", "much"),
    ("ablate", "some"),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_names_option_value_and_what_is_allowed(name, value):
    with pytest.raises(OptionError) as refusal:
        split(options={name: value})
    allowed = {row.name: row.allowed for row in describe_options()}[name]
    assert str(refusal.value) == f"{name} is {value!r}, from option {name!r}; allowed: {allowed}"


def test_a_bad_value_of_the_environment_names_the_variable():
    with pytest.raises(OptionError) as refusal:
        split(environ={"FXOPT_PAIRS": "lots"})
    assert "pairs is 'lots', from environment variable FXOPT_PAIRS" in str(refusal.value)


def test_a_bad_value_that_is_overruled_does_no_harm():
    assert split(options={"pairs": 9}, environ={"FXOPT_PAIRS": "lots"})[0].pairs == 9


@pytest.mark.parametrize(
    ("value", "expected"), [("BF16", "bf16"), (" tf32 ", "tf32"), ("0.01", 0.01), (1e-5, 1e-5)]
)
def test_precision_is_a_class_or_an_error_budget(value, expected):
    assert resolve_options({"precision": value}, environ={}).precision == expected


@pytest.mark.parametrize(
    ("given", "read"),
    [(None, None), ("none", None), (1 << 30, 1 << 30), ("1024", 1024), (2e9, 2 * 10**9), ("20%", "20%")],
)
def test_memory_is_bytes_or_a_share_and_bears_on_the_plan(given, read):
    options = resolve_options({"memory_limit": given}, environ={})
    assert options.memory_limit == read == options.deciding()["memory_limit"]


def test_passes_may_be_a_list_one_string_or_all():
    assert resolve_options({"passes": ["a", "b"]}, environ={}).passes == ("a", "b")
    assert resolve_options({"passes": "a,b,"}, environ={}).passes == ("a", "b")
    assert resolve_options({"passes": "all"}, environ={"FXOPT_PASSES": "a"}).passes is None
    assert resolve_options({"passes": []}, environ={}).passes == ()


def test_the_home_directory_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert resolve_options({"plan_dir": "~/plans"}, environ={}).plan_dir == Path("/somewhere/plans")


def test_plans_lie_in_the_users_cache_unless_a_directory_is_given():
    import platformdirs

    assert resolve_options({}, environ={}).plan_root == platformdirs.user_cache_path("fxopt")
    assert resolve_options({"plan_dir": "elsewhere"}, environ={}).plan_root == Path("elsewhere")


def test_freezing_is_for_the_session_alone():
    with pytest.raises(OptionError, match=r"Use fxopt\.optimize"):
        split(options={"freeze": True})
    assert split(environ={"FXOPT_FREEZE": "1"})[0].freeze is False
    assert split(options={"freeze": True}, session=True)[0].freeze is True


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(ValidationError):
        Options().pairs = 3  # type: ignore[misc]


def test_the_deciding_options_leave_out_what_only_steers_the_measuring():
    deciding = set(Options().deciding())
    assert {"precision", "objective", "passes", "disable", "logits", "freeze"} <= deciding
    assert not deciding & {"plan_dir", "report", "verbose", "on_error", "time_limit", "pairs"}


def test_the_deciding_options_go_into_a_plan_key():
    from fxopt.plan import plan_key

    with_names = resolve_options({"passes": ["a"], "disable": "b"}, environ={})
    assert plan_key(options=with_names.deciding()) != plan_key(options=Options().deciding())


def test_the_description_covers_every_option():
    rows = describe_options()
    assert [row.name for row in rows] == ["mode", *Options.model_fields]
    assert all(row.allowed and row.description for row in rows)
    assert {row.name for row in rows if not row.environment} == {"freeze"}


@given(
    st.text(max_size=30), st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9))
)
def test_whatever_is_given_is_used_or_refused_as_an_option(name, value):
    try:
        options, mode, patches = split(options={name: value})
    except OptionError as refusal:
        assert repr(name) in str(refusal) or name.replace("-", "_") in str(refusal)
    else:
        assert isinstance(options, Options) and isinstance(mode, Mode) and set(patches) <= KEYS


# --- thresholds


BY_RULE = "[memory_bound]\ndram_throughput = 70\n[divergent]\nthreads_per_instruction = 16.5\n"
FLAT = '"memory_bound.dram_throughput" = 70\n"divergent.threads_per_instruction" = 16.5\n'


@pytest.mark.parametrize("text", [BY_RULE, FLAT], ids=["by rule", "flat"])
def test_thresholds_come_from_a_toml_file_by_option_and_by_environment(tmp_path, text):
    file = tmp_path / "limits.toml"
    file.write_text(text)
    expected = (("divergent.threads_per_instruction", 16.5), ("memory_bound.dram_throughput", 70.0))
    assert resolve_options({"thresholds": str(file)}).thresholds == expected
    assert resolve_options({}, environ={"FXOPT_THRESHOLDS": str(file)}).thresholds == expected


def test_thresholds_come_from_a_mapping_and_bear_on_the_plan():
    flat = resolve_options({"thresholds": {"memory_bound.dram_throughput": 70}})
    nested = resolve_options({"thresholds": {"memory_bound": {"dram_throughput": 70}}})
    assert flat.thresholds == nested.thresholds == (("memory_bound.dram_throughput", 70.0),)
    assert flat.deciding() != resolve_options({}).deciding()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_bound.dram": 1}, "memory_bound.dram_throughput"),
        ({"memory_bound.dram_throughput": "high"}, "expected a finite number"),
        ({"memory_bound.dram_throughput": True}, "expected a finite number"),
        ("no/such/file.toml", r"^no/such/file\.toml cannot be read: No such file"),
        ({"launch_bound.launch_gap": -0.1}, "^threshold 'launch_bound.launch_gap' is -0.1, expected a share"),
        ({"launch_bound.launch_gap": 15}, "expected a share from 0 to 1"),
        ({"memory_bound.dram_throughput": 101}, "expected per cent from 0 to 100"),
        ({"excess_traffic.traffic_ratio": -1}, "expected 0 or more"),
        (3, "not a mapping"),
    ],
)
def test_thresholds_that_cannot_be_used_are_refused_with_the_reason(given, message):
    with pytest.raises(OptionError, match=message):
        resolve_options({"thresholds": given})


def test_a_file_that_is_not_toml_is_named(tmp_path):
    file = tmp_path / "limits.toml"
    file.write_text("memory_bound = {")
    with pytest.raises(OptionError, match=rf"^{re.escape(str(file))}, .*: this is not TOML: "):
        resolve_options({"thresholds": file})
    file.write_bytes(b"\xff")
    with pytest.raises(OptionError, match=rf"^{re.escape(str(file))}, byte 0: this is not UTF-8"):
        resolve_options({"thresholds": file})


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("# mine\n[memory_bound]\ndram_throughput = 70\nnothing here\n", 4, "this is not TOML"),
        ("# mine\n[memory_bound]\n\ndram_throughput = -70\n", 4, "threshold 'memory_bound.dram_throughput' is -70"),
        ("[divergent]\nthreads_per_instruction = 4\n[memory_bound]\ndram = 1\n", 4, "no threshold is named"),
        ('# mine\n"memory_bound.dram_throughput" = "high"\n', 2, "threshold 'memory_bound.dram_throughput' is 'high'"),
        ("memory_bound . dram_throughput = 1e9\n", 1, "threshold 'memory_bound.dram_throughput' is 1e+09"),
        ("\nmemory_bound = {dram_throughput = nan}\n", 2, "threshold 'memory_bound.dram_throughput' is 'nan'"),
    ],
)
def test_what_is_wrong_in_a_file_of_thresholds_comes_first_with_its_line(tmp_path, text, line, message):
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(OptionError) as refused:
        resolve_options({}, environ={"FXOPT_THRESHOLDS": str(file)})
    said = str(refused.value)
    assert said.startswith(f"{file}, line {line}") and message in said
    assert said.endswith("(environment variable FXOPT_THRESHOLDS)")


def test_every_rule_keeps_to_the_ranges_of_its_thresholds():
    from fxopt.rules import RULES, thresholds

    assert thresholds(thresholds()) == thresholds()
    for bound in (0, 1):  # within every range
        assert thresholds({f"{rule.name}.{name}": bound for rule in RULES for name in rule.thresholds})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FXOPT_PRECISON", "did you mean FXOPT_PRECISION?"),
        ("FXOPT_DISABEL", "did you mean FXOPT_DISABLE?"),
        ("FXOPT_QQQQ", "`fxopt options` lists"),
    ],
)
def test_a_misspelt_environment_variable_is_told(name, says):
    with pytest.warns(FxoptWarning, match=f"{name} is none of fxopt's and has no effect.*{re.escape(says)}"):
        resolve_options({}, environ={name: "1", "PATH": "/bin"})


def test_variables_that_set_no_option_are_known(recwarn):
    known = ("FXOPT_MODE", "FXOPT_PLAN_DIR", "FXOPT_BISECT", "FXOPT_BISECT_LOG", "FXOPT_DUMP", "FXOPT_VERBOSE")
    resolve_options({}, environ=dict.fromkeys(known, ""))
    assert not [w for w in recwarn if issubclass(w.category, FxoptWarning)]


def test_values_of_inductors_options_have_the_types_that_torch_compile_wants():
    from fxopt.torch_api.inductor import check_values

    check_values({"max_autotune": True, "max_fusion_size": 7, "joint_custom_pre_pass": None})
    for key, value in (("max_autotune", "banana"), ("max_autotune", 1), ("max_fusion_size", "7")):
        with pytest.raises(OptionError, match=f"{key} is {value!r}, a {type(value).__name__}"):
            check_values({key: value})
        with pytest.raises(RuntimeError, match="Unexpected type"):
            torch._TorchCompileInductorWrapper(None, {key: value}, False)
