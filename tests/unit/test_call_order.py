from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler_core.attribute import call_order
from profiler_core.attribute.call_order import Match, match


def matched(kernels: str, rows: str) -> list[int]:
    return match(list(kernels), list(rows)).index.tolist()


def test_equal_sequences_match_one_to_one() -> None:
    result = match(["a", "b", "a"], ["a", "b", "a"])
    assert result.exact
    assert result.index.dtype == np.int64 and result.index.tolist() == [0, 1, 2]
    assert result.unmatched_kernels == result.unmatched_counters == result.notes == ()


def test_nothing_against_nothing_is_exact_and_nothing_against_something_is_not() -> None:
    assert match([], []).exact
    assert not match(["a"], []).exact and match(["a"], []).unmatched_kernels == (0,)
    assert match([], ["a"]).unmatched_counters == (0,)


def test_a_dropped_row_leaves_only_its_kernel_without_one() -> None:
    result = match(list("abcabd"), list("abcbd"))
    assert result.index.tolist() == [0, 1, 2, -1, 3, 4]
    assert not result.exact
    assert result.unmatched_kernels == (3,) and result.unmatched_counters == ()
    assert result.notes[0] == "1 of 6 kernels have no counter row of their own, 0 of 5 rows no kernel."
    assert "No row for kernel 3 (a)." in result.notes


def test_rows_before_after_and_of_another_process_belong_to_no_kernel() -> None:
    result = match(list("abc"), list("xxabycz"))
    assert result.index.tolist() == [2, 3, 5]
    assert result.unmatched_counters == (0, 1, 4, 6)
    assert "No kernel for row 6 (z), after the last kernel." in result.notes


def test_which_of_equal_neighbours_was_dropped_cannot_be_known() -> None:
    result = match(["a", *["b"] * 10, "c"], ["a", *["b"] * 9, "c"])
    assert result.index.tolist() == [0, *[-1] * 10, 10]
    assert result.notes[1] == "No unambiguous pairing of kernels 1 to 10 (b) with rows 1 to 9 (b); none was paired."


def test_which_of_two_rows_is_the_copy_cannot_be_known() -> None:
    assert matched("abc", "abbc") == [0, -1, 3]


def test_shapes_tell_equal_names_apart() -> None:
    kernels = [(1, 1, 1, 32, 1, 1), (2, 1, 1, 32, 1, 1), (3, 1, 1, 32, 1, 1)]
    result = match(["k"] * 3, ["k"] * 2, kernel_shapes=kernels, counter_shapes=np.asarray(kernels)[[0, 2]])
    assert result.index.tolist() == [0, -1, 1]


def test_an_unknown_shape_agrees_with_every_shape() -> None:
    known, unknown = (8, 1, 1, 128, 1, 1), (0, 0, 0, 0, 0, 0)
    assert match(["k"], ["k"], kernel_shapes=[known], counter_shapes=[unknown]).exact
    assert match(["k"], ["k"], kernel_shapes=[known]).exact
    assert match(["k"], ["k"], kernel_shapes=[(8, 1, 1, 0, 0, 0)], counter_shapes=[known]).exact
    other = (9, 1, 1, 128, 1, 1)
    assert match(["k"], ["k"], kernel_shapes=[known], counter_shapes=[other]).index.tolist() == [-1]


def test_shapes_must_be_as_many_as_names() -> None:
    with pytest.raises(ValueError, match="kernel_shapes has 1 rows for 2 names"):
        match(["a", "b"], ["a"], kernel_shapes=[(1, 1, 1, 1, 1, 1)])


def test_spellings_of_two_tools_and_bare_names_match() -> None:
    kernels = ["void ns::k<4, true>(int)", "triton_0", "void ns::k<8, false>(int)"]
    assert match(kernels, ["void ns::k<(int)4, (bool)1>(T1)", "triton_0", "void ns::k<(int)8, (bool)0>(T1)"]).exact
    assert match(kernels, ["k", "triton_0", "k"]).exact
    assert matched("ab", "ab") == [0, 1]
    # A bare name fits both instances of the template, so with one of its rows missing neither is paired with
    # certainty but where the neighbours decide.
    assert match(kernels, ["triton_0", "k"]).index.tolist() == [-1, 0, 1]
    assert match([kernels[0], kernels[2]], ["k"]).index.tolist() == [-1, -1]


def test_neighbours_that_changed_places_are_left_out_and_nothing_else() -> None:
    assert matched("lgrgrgrf", "lggrrgrf") == [0, 1, -1, -1, 4, 5, 6, 7]
    assert matched("ab", "ba") == [-1, -1]


def test_one_iteration_of_rows_cannot_be_told_to_belong_to_one_of_two() -> None:
    result = match(list("abcabc"), list("abc"))
    assert result.index.tolist() == [-1] * 6
    assert any("fit the kernels at more than one place" in note for note in result.notes)
    assert any("fit the rows at more than one place" in note for note in match(list("abc"), list("abcabc")).notes)


def test_sequences_too_long_to_align_are_matched_only_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_order, "MAX_CELLS", 10)
    assert match(list("abcd"), list("abcd")).exact
    result = match(list("abcd"), list("abd"))
    assert result.index.tolist() == [-1] * 4 and "too many to align" in result.notes[1]


def test_many_places_are_counted_rather_than_listed() -> None:
    kernels = [f"k{i}" for i in range(100)]
    notes = match(kernels, kernels[1::2]).notes
    assert len(notes) < 15 and "further places" in notes[-1]


# --- against all explanations --------------------------------------------------------------------------------------


def best_pairings(kernels: str, rows: str) -> list[frozenset[tuple[int, int]]]:
    """Every longest common subsequence as pairs of positions, by trying all."""
    for size in range(min(len(kernels), len(rows)), -1, -1):
        found = [
            frozenset(zip(left, right, strict=True))
            for left in combinations(range(len(kernels)), size)
            for right in combinations(range(len(rows)), size)
            if all(kernels[i] == rows[j] for i, j in zip(left, right, strict=True))
        ]
        if found:
            return found
    raise AssertionError("the empty pairing is always there")


def pairs(result: Match) -> set[tuple[int, int]]:
    return {(i, j) for i, j in enumerate(result.index.tolist()) if j >= 0}


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_every_pair_that_all_best_explanations_share_is_found(kernels: str, rows: str) -> None:
    everywhere = frozenset.intersection(*best_pairings(kernels, rows))
    assert everywhere <= pairs(match(list(kernels), list(rows)))


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_every_pair_is_part_of_a_best_explanation(kernels: str, rows: str) -> None:
    result = pairs(match(list(kernels), list(rows)))
    assert any(result <= best for best in best_pairings(kernels, rows))


@given(st.text("abcd", max_size=40), st.randoms(use_true_random=False))
def test_where_rows_are_missing_every_pair_is_the_true_one(kernels: str, chance: random.Random) -> None:
    kept = [i for i in range(len(kernels)) if chance.random() < 0.8]
    result = match(list(kernels), [kernels[i] for i in kept])
    for i, j in pairs(result):
        assert kept[j] == i
    # What no other choice of dropped rows explains is found: a kernel between two of other names.
    if len(kept) == len(kernels) - 1:
        (dropped,) = set(range(len(kernels))) - set(kept)
        run = {dropped}
        while min(run) > 0 and kernels[min(run) - 1] == kernels[dropped]:
            run.add(min(run) - 1)
        while max(run) + 1 < len(kernels) and kernels[max(run) + 1] == kernels[dropped]:
            run.add(max(run) + 1)
        assert set(result.unmatched_kernels) == run


@given(st.text("abcd", max_size=40), st.randoms(use_true_random=False))
def test_where_rows_are_surplus_every_pair_is_the_true_one(kernels: str, chance: random.Random) -> None:
    rows: list[tuple[str, int]] = []
    for i, name in enumerate(kernels):
        rows += [(chance.choice("abcd"), -1)] * (chance.random() < 0.2) + [(name, i)]
    for i, j in pairs(match(list(kernels), [name for name, _ in rows])):
        assert rows[j][1] == i


@given(st.text("abc", max_size=30), st.integers(0, 28))
def test_one_exchange_of_neighbours_touches_those_two_alone(kernels: str, at: int) -> None:
    if at + 1 >= len(kernels) or kernels[at] == kernels[at + 1]:
        return
    rows = [*kernels[:at], kernels[at + 1], kernels[at], *kernels[at + 2 :]]
    result = match(list(kernels), rows)
    assert result.unmatched_kernels == (at, at + 1)
    assert all(i == j for i, j in pairs(result))


def test_the_order_of_the_arguments_does_not_matter() -> None:
    chance = random.Random(0)
    for _ in range(200):
        a = "".join(chance.choices("abc", k=12))
        b = "".join(chance.choices("abc", k=10))
        assert pairs(match(list(a), list(b))) == {(i, j) for j, i in pairs(match(list(b), list(a)))}


def test_long_sequences_with_few_differences_are_aligned() -> None:
    chance = random.Random(1)
    iteration = [f"k{chance.randrange(40)}" for _ in range(100)]
    kernels = [f"start{i}" for i in range(500)] + iteration * 40
    dropped = {700, 1500, 2222, 4000}
    kept = [i for i in range(len(kernels)) if i not in dropped]
    result = match(kernels, [kernels[i] for i in kept])
    assert all(kept[j] == i for i, j in pairs(result))
    assert len(result.unmatched_kernels) <= 3 * len(dropped) and dropped <= set(result.unmatched_kernels)
