"""`fxopt.collect_reports`: every graph of a block, however many the process remembers."""

from __future__ import annotations

import threading

import made_reports
import pytest

import fxopt
from fxopt.report import model


@pytest.fixture(autouse=True)
def full(monkeypatch):
    """A process that remembers as many graphs as it may."""
    kept = model.deque((made_reports.graph() for _ in range(3)), maxlen=3)
    monkeypatch.setattr(model, "_recent", kept)


def test_all_of_a_block_are_there_though_the_process_remembers_fewer():
    made = [made_reports.graph() for _ in range(8)]
    with fxopt.collect_reports() as found:
        assert found == []
        for graph in made:
            model.remember(graph)
    model.remember(made_reports.graph())
    assert list(map(id, found)) == list(map(id, made))
    assert len(fxopt.recent_reports()) == 3


def test_blocks_inside_each_other_get_what_was_made_while_they_were_open():
    with fxopt.collect_reports() as outer:
        with fxopt.collect_reports() as inner:
            pass  # both lists are empty, and equal
        model.remember(made_reports.graph())
    assert (len(outer), len(inner)) == (1, 0)


def test_what_another_thread_compiles_counts_and_an_error_ends_the_block():
    with pytest.raises(KeyError), fxopt.collect_reports() as found:
        thread = threading.Thread(target=model.remember, args=(made_reports.graph(),))
        thread.start()
        thread.join()
        raise KeyError
    model.remember(made_reports.graph())
    assert len(found) == 1
