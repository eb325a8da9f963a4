"""Tiles of split products: which are worth measuring, which is chosen, and the file that remembers it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt import fingerprints
from passes.kernels import launch, tiling
from passes.kernels.tiling import Choices, Product
from passes.split_products import block_of
from profiler_core import exclusive

CUDA = torch.device("cuda", 0)
H200 = 132
TILE = (64, 64, 64, 2, 4, 3)
TOOK = 12.5
SHAPES = [
    *(Product(512, 768, 768), Product(512, 3072, 768), Product(512, 50257, 768), Product(8192, 8192, 8192)),
    *(Product(64, 64, 4096), Product(16, 16, 16), Product(17, 50000, 768), Product(300, 20, 1000)),
    *(Product(128, 128, 64, batch=96), Product(33, 33, 64, batch=100), Product(512, 768, 770)),
]


@pytest.fixture
def measured(monkeypatch):
    """Stands in for a card: the products that were measured, each of which finds TILE the fastest."""
    seen = []
    card = SimpleNamespace(name="a card", multi_processor_count=H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="1.2.3"))
    monkeypatch.setattr("profiler_core.wake.wake", lambda device: None)
    monkeypatch.setattr(tiling, "compile_tiles", lambda product, device: None)
    monkeypatch.setattr(tiling, "measure_tiles", lambda product, device: seen.append(product) or [*TILE, TOOK])
    monkeypatch.setattr(tiling, "measure_library", lambda product, device: seen.append(product) or 7.5)
    return seen


# ---------------------------------------------------------------- which are worth measuring


@pytest.mark.parametrize("hopper", [False, True], ids=["any chip", "Hopper"])
@pytest.mark.parametrize("terms", [3, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_option_is_a_tile_that_the_kernel_takes(shape, terms, hopper):
    product = Product(shape.m, shape.n, shape.k, batch=shape.batch, terms=terms)
    found = tiling.options(product, H200, hopper)
    assert found and len(set(found)) == len(found)
    for bm, bn, bk, shares, warps, stages in found:
        assert all(size >= 16 and size & (size - 1) == 0 for size in (bm, bn, bk))
        if shares == 0:
            assert warps == launch.HOPPER
        else:
            assert shares in (1, 2, 4) and (shares == 1 or product.k >= 128 * shares)
        assert warps in (4, 8) or (hopper and warps == launch.HOPPER)
        planes = 2 if terms == 3 else 1
        assert (bm + bn) * bk * 2 * planes * stages <= 227 * 1024, "shared memory of an H200, in bytes"


def test_a_block_of_scales_is_whole_steps_of_every_tile():
    blocks = {block_of(k) for k in range(1, 8193)} - {0}

    assert blocks
    assert all(block % tile[2] == 0 for block in blocks for tile in (*tiling.TILES, *tiling.HOPPER_TILES))


@pytest.mark.parametrize(("m", "n"), [(16, 4096), (4096, 48)])
def test_no_tile_is_mostly_padding(m, n):
    for bm, bn, *_ in tiling.options(Product(m, n, 768), H200):
        assert bm <= max(64, 2 * m) and bn <= max(64, 2 * n)


def test_steps_are_dealt_out_evenly_on_hopper_where_whole_tiles_would_leave_many_multiprocessors_without_work():
    def even(product, hopper=True):
        return [tile for tile in tiling.options(product, H200, hopper) if tile[3] == 0]

    assert even(Product(512, 2304, 768)), "72 tiles"
    assert all(tile[4] == launch.HOPPER for tile in even(Product(512, 2304, 768)))
    assert not even(Product(512, 2304, 768), hopper=False)
    assert not even(Product(512, 2304, 768, terms=1))
    assert not even(Product(8192, 8192, 768)), "4096 tiles"


def test_k_is_shared_out_only_where_the_tiles_do_not_fill_the_device():
    few = tiling.options(Product(64, 64, 4096), H200)
    assert few[0][3] > 1
    for many in (Product(8192, 8192, 4096), Product(64, 64, 4096, batch=400)):
        assert {tile[3] for tile in tiling.options(many, H200)} == {1}


@pytest.mark.parametrize("product", [Product(512, 768, 768), Product(512, 3072, 768), Product(64, 64, 4096)], ids=str)
def test_the_likely_best_keeps_most_multiprocessors_at_work_or_cannot(product):
    bm, bn, _, shares, *_ = tiling.options(product, H200)[0]
    tiles = math.ceil(product.m / bm) * math.ceil(product.n / bn)
    assert tiles * shares >= H200 // 2 or product.k / shares <= 1024


def test_hoppers_own_tiles_are_for_hopper_and_what_it_can_fetch():
    def of_hopper(product, hopper=True):
        return [tile for tile in tiling.options(product, H200, hopper) if tile[4] == launch.HOPPER]

    assert of_hopper(Product(512, 768, 768))
    assert not of_hopper(Product(512, 768, 768), hopper=False)
    assert not of_hopper(Product(512, 768, 768, batch=4))
    assert not of_hopper(Product(512, 768, 770)), "rows that are not aligned"
    assert of_hopper(Product(512, 768, 768, terms=1))
    assert not of_hopper(Product(512, 768, 2048, terms=1, block=128)), "a single product has one scale a row"


def test_without_a_card_the_likely_best_is_taken_and_nothing_is_kept(tmp_path):
    choices = Choices(tmp_path / "tiles.json")
    for device in (torch.device("cpu"), *([] if torch.cuda.is_available() else [CUDA])):
        for terms in (3, 1):
            product = Product(512, 768, 768, terms=terms)
            assert choices.tile(product, device) == (tiling.options(product, H200)[0], 0.0)
        assert choices.library(product, device) == 0.0
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- what is remembered

ONE = Product(512, 768, 640)


def test_a_product_is_measured_once(measured, tmp_path):
    choices = Choices(tmp_path / "below" / "tiles.json")
    for _ in range(2):
        assert choices.tile(ONE, CUDA) == (TILE, TOOK)
        assert choices.library(ONE, CUDA) == 7.5
    assert measured == [ONE, ONE], "its tile, and the library's product"
    others = [Product(512, 768, 640, **{name: 1}) for name in ("terms", "block", "bias")]
    for other in others:
        choices.tile(other, CUDA)
    assert measured[2:] == others


def test_a_later_process_finds_it_in_the_file(measured, tmp_path):
    keep = tmp_path / "tiles.json"
    first = Choices(keep)
    first.tile(ONE, CUDA), first.library(ONE, CUDA)
    later = Choices(keep)
    assert later.tile(ONE, CUDA) == (TILE, TOOK) and later.library(ONE, CUDA) == 7.5
    assert len(measured) == 2
    for key in json.loads(keep.read_text()):
        assert all(part in key for part in ("a card", "1.2.3", torch.__version__, "512", "768", "640"))


def test_a_process_reads_a_file_once(tmp_path):
    assert tiling.choices(tmp_path / "tiles.json") is tiling.choices(tmp_path / "tiles.json")
    assert tiling.choices(tmp_path / "other.json") is not tiling.choices(tmp_path / "tiles.json")


def test_without_a_file_it_is_remembered_in_the_process(measured):
    choices = Choices(None)
    assert choices.tile(ONE, CUDA) == choices.tile(ONE, CUDA) == (TILE, TOOK)
    assert len(measured) == 1


def test_another_card_or_another_triton_measures_anew(measured, tmp_path, monkeypatch):
    keep = tmp_path / "tiles.json"
    Choices(keep).tile(ONE, CUDA)
    monkeypatch.setattr(sys.modules["triton"], "__version__", "9")
    Choices(keep).tile(ONE, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="another"))
    Choices(keep).tile(ONE, CUDA)
    assert len(measured) == 3 and len(json.loads(keep.read_text())) == 3


def test_other_tiles_or_another_kernel_measure_anew(measured, tmp_path, monkeypatch):
    keep = tmp_path / "tiles.json"
    single = replace(ONE, terms=1)

    def again():
        tiling._code_of.cache_clear()
        Choices(keep).tile(ONE, CUDA), Choices(keep).tile(single, CUDA), Choices(keep).library(ONE, CUDA)

    again()
    monkeypatch.setattr(tiling, "HOPPER_SINGLE_TILES", tiling.HOPPER_SINGLE_TILES[:1])
    again()
    assert measured[3:] == [single], "the tiles of three products are the same"
    monkeypatch.setattr(fingerprints, "module_digest", lambda name: name)
    again()
    assert measured[4:] == [ONE, single], "the library's product has no code here"
    tiling._code_of.cache_clear()


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '{"a": 1}', '{"a": [1, 2]}', '{"a": "abcdefg"}', '{"a": {"b": 1}}', "\x00\xff"],
)
def test_a_file_that_cannot_be_read_is_measured_and_written_anew(text, measured, tmp_path):
    keep = tmp_path / "tiles.json"
    keep.write_bytes(text.encode("latin-1"))
    assert Choices(keep).tile(ONE, CUDA) == (TILE, TOOK)
    assert measured == [ONE]
    assert list(json.loads(keep.read_text()).values()) == [[*TILE, TOOK]]


def kept_in(folder):
    """Its files but for locks."""
    return sorted(name for name in os.listdir(folder) if not name.endswith((".lock", ".next")))


def test_a_file_that_cannot_be_written_only_costs_the_memory_of_it(measured, tmp_path):
    folder, below = tmp_path / "tiles.json", tmp_path / "file"
    folder.mkdir()
    (folder / "other").touch()
    below.touch()
    for keep in (folder, below / "tiles.json"):
        assert Choices(keep).tile(ONE, CUDA) == (TILE, TOOK)
    assert kept_in(tmp_path) == ["file", "tiles.json"] and kept_in(folder) == ["other"]


def test_what_another_process_wrote_meanwhile_is_kept_and_known(measured, tmp_path):
    keep = tmp_path / "tiles.json"
    ours, theirs = Choices(keep), Choices(keep)
    other = Product(512, 769, 640)
    theirs.tile(ONE, CUDA)
    ours.tile(other, CUDA)
    assert len(json.loads(keep.read_text())) == 2
    assert ours.tile(ONE, CUDA) == (TILE, TOOK) and measured == [ONE, other]


def test_a_reader_finds_a_whole_file_at_any_time(measured, tmp_path):
    keep = tmp_path / "tiles.json"
    choices = Choices(keep)
    choices.tile(Product(512, 1, 640), CUDA)
    stop, broken = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                json.loads(keep.read_text())
            except Exception as error:
                broken.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(2, 40):
        choices.tile(Product(512, n, 640), CUDA)
    stop.set()
    reader.join()
    assert not broken and kept_in(tmp_path) == ["tiles.json"]


def test_kernels_are_compiled_while_others_measure_and_by_one_process_alone(measured, tmp_path, monkeypatch):
    events, keep = [], tmp_path / "tiles.json"

    @contextlib.contextmanager
    def held(*given):
        events.append("begin")
        yield True
        events.append("end")

    def compile_slowly(product, device):
        events.append("compile")
        time.sleep(0.3)

    monkeypatch.setattr(exclusive, "measuring", held)
    monkeypatch.setattr(tiling, "compile_tiles", compile_slowly)
    found = []
    threads = [threading.Thread(target=lambda: found.append(Choices(keep).tile(ONE, CUDA))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(TILE, TOOK)] * 3 and measured == [ONE]
    assert events == ["compile", "begin", "end"]


def test_different_products_are_compiled_beside_each_other_and_all_are_written(measured, tmp_path, monkeypatch):
    keep, both = tmp_path / "tiles.json", threading.Barrier(2, timeout=60)
    monkeypatch.setattr(tiling, "compile_tiles", lambda product, device: both.wait())
    threads = [threading.Thread(target=Choices(keep).tile, args=(Product(512, n, 640), CUDA)) for n in (768, 769)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken, "one waited for the other"
    assert len(json.loads(keep.read_text())) == len(measured) == 2


# ---------------------------------------------------------------- how it is measured


@pytest.fixture
def card(monkeypatch):
    """CUDA graphs that take as long as the calls captured in them say, with a disturbance in the first 20 ms."""
    now, captured, under_way = [0.0], [], []

    class Graph:
        def replay(self):
            now[0] += sum(captured[self.number]) / 1e3 * (3 if now[0] < 20 else 1)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    @contextlib.contextmanager
    def capture(graph, capture_error_mode):
        graph.number = len(captured)
        captured.append([])
        under_way.append(captured[-1])
        yield
        under_way.clear()

    def call(microseconds):
        return lambda i: [times.append(microseconds) for times in under_way]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("fxopt.torch_api.cuda.cublas_workspaces_of_a_capture", contextlib.nullcontext)
    return call


def test_what_is_timed_first_does_not_look_slow_for_what_else_happens_then(card):
    assert tiling._times([card(100.0), card(150.0), card(200.0)]) == pytest.approx([100.0, 150.0, 200.0])


def test_a_tile_that_the_chip_has_no_room_for_takes_for_ever_and_the_others_their_time(card):
    def broken(i):
        raise RuntimeError("out of resource: shared memory")

    assert tiling._times([card(100.0), broken, card(50.0)]) == pytest.approx([100.0, math.inf, 50.0])
    with pytest.raises(RuntimeError, match="shared memory"):
        tiling._time(broken)


def test_the_device_is_woken_before_anything_is_timed(measured, monkeypatch):
    """By work that is done: a pass asks while AOTAutograd traces, where tensors are fake."""
    events = []

    def wake(device):
        assert type(torch.zeros(1)) is torch.Tensor and not torch.is_grad_enabled()
        events.append(("wake", len(measured)))

    monkeypatch.setattr("profiler_core.wake.wake", wake)
    choices = Choices(None)
    with FakeTensorMode():
        choices.tile(ONE, CUDA), choices.library(ONE, CUDA), choices.tile(ONE, CUDA)
    assert events == [("wake", 0), ("wake", 1)]


def test_locks_are_hidden_from_what_makes_room(measured, tmp_path):
    Choices(tmp_path / "tiles.json").tile(ONE, CUDA)
    locks = [name for name in os.listdir(tmp_path) if name != "tiles.json"]
    assert locks and all(name.startswith(".") for name in locks)


def test_each_tile_is_launched_with_operands_of_its_own_and_the_fastest_is_found(monkeypatch):
    """One that reads more shares pays for that; outputs of one shape share their memory."""
    launched = {}

    def gemm(left, right, bias, out, tile, counts):
        assert left[0].shape == (64, 128) and right[0].shape == (192, 128) and right[1] is right[0]
        assert left[2].shape == (64, 1) and right[2].shape == (192, 1) and (bias is None) == (tile[3] > 1)
        assert out.shape == (1, max(tile[3], 1), 64, 192) and counts.dtype == torch.int32
        launched[tile] = launched.get(tile, (0, 0))[0] + 1, out.data_ptr()

    def times(calls):
        for number, call in enumerate(calls):
            call(0), call(number)
        return [9.0, 5.0, 5.01, math.inf][: len(calls)]

    tiles = [(64, 64, 64, 1, 4, 3), (64, 64, 32, 2, 4, 2), (64, 64, 32, 1, 4, 2), (128, 128, 64, 1, 8, 3)]
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tiling, "_tried", lambda product, device: tiles)
    monkeypatch.setattr(tiling, "gemm", gemm)
    monkeypatch.setattr(tiling, "_times", times)
    product = Product(64, 192, 128, bias=True)
    assert tiling.measure_tiles(product, torch.device("cpu")) == [*tiles[2], 5.01], "5.00, and 0.016 to read the sums"
    assert [count for count, _ in launched.values()] == [2] * 4
    assert len({address for _, address in launched.values()}) == 2
    monkeypatch.setattr(tiling, "_times", lambda calls: [math.inf] * 4)
    assert tiling.measure_tiles(product, torch.device("cpu")) == [*tiling._SMALLEST, math.inf]
