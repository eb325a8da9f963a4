"""What every test gets: its own plan directory, the session's Inductor cache, none of the user's settings."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
# A directory to keep Inductor's cache in between runs, for whoever runs one test again and again.
CACHE_VARIABLE = "FXOPT_TEST_INDUCTOR_CACHE"
_MADE_HERE = "FXOPT_TEST_CACHE_OWNER"


def pytest_configure(config: pytest.Config) -> None:
    """Gives the session a cold Inductor cache of its own, before anything imports torch.

    Environment variables, not torch's config: the subprocesses that tests start share the cache.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get(_MADE_HERE):  # a worker process: the controller has set it up
        return
    kept = os.environ.get(CACHE_VARIABLE)
    cache = Path(kept).resolve() if kept else Path(tempfile.mkdtemp(prefix="fxopt-test-inductor-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    os.environ.pop("TRITON_CACHE_DIR", None)  # Inductor then puts it below its own
    os.environ[_MADE_HERE] = str(os.getpid())
    if not kept:
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))


def pytest_unconfigure(config: pytest.Config) -> None:
    if os.environ.get(_MADE_HERE) == str(os.getpid()):
        del os.environ[_MADE_HERE]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:  # do not import torch for nothing
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(
            reason="needs an NVIDIA GPU that torch can use; torch.cuda.is_available() is False"
        )
        for item in needing:
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """For a whole run: what Inductor finds out of the compiler in every process (a second, on a cold cache six) is
    found out once.
    """
    if len(session.items) < 300 or session.config.option.collectonly or platform.machine() != "x86_64":
        return
    from torch._inductor import config, cpu_vec_isa

    flags = cpu_vec_isa.x86_isa_checker()
    said = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in flags for flag in str(isa).split())]
    if said and all(map(bool, said)):  # which compiles and loads something for each
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
        config.cpp.vec_isa_ok = True


@pytest.fixture(autouse=True)
def plan_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plan directory of this test alone (not created yet), with the user's FXOPT_* out of the way."""
    for name in list(os.environ):
        if name.startswith("FXOPT_") and name not in (CACHE_VARIABLE, _MADE_HERE, "FXOPT_SHARED"):
            monkeypatch.delenv(name)
    directory = tmp_path / "fxopt-plans"
    monkeypatch.setenv("FXOPT_PLAN_DIR", str(directory))
    return directory


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded traces and captures beside the repository, or at $FXOPT_SHARED."""
    directory = Path(os.environ.get("FXOPT_SHARED") or REPOSITORY.parent / "shared").resolve()
    if not directory.is_dir():
        pytest.skip(f"needs the recorded traces; there is no {directory} (set FXOPT_SHARED)")
    return directory


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo without what earlier tests compiled, and nothing left behind for later ones."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def in_scripts(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Iterator[None]:
    """In the folder of the programs that were not written for fxopt, whose package nobody has imported."""
    monkeypatch.chdir(REPOSITORY / "tests" / "fixtures" / "scripts")
    _forget_package()  # another test may have imported one of this name, perhaps from elsewhere
    yield
    _forget_package()


def _forget_package() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "package"]:
        del sys.modules[name]
