"""Every test starts with the same seed, and fails if it leaves global state changed."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator

import pytest
from support.hidden_gpus import hide_gpus

hide_gpus(os.environ)
pytest_plugins = ["support.full", "support.results"]

# Set by pytest itself during a test, or by torch permanently on the first question about CUDA.
_NOT_OURS = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by accelerate, which peft imports
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection during collection: everything imported and made here
    stays alive.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_configure() -> None:
    """Restore Ctrl-C: a shell's background jobs ignore it, and so would the programs tests
    interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish() -> None:
    """Close the pipes to ranks before the interpreter warns about each of them."""
    if "support.ranks" in sys.modules:
        sys.modules["support.ranks"].end_waiting_ranks()


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_is_no_garbage() -> None:
    """Exclude objects that exist before a module's tests from garbage collection.

    A collection visits every object of torch, of bigtrain and of thousands of collected tests. It
    takes a third of a second; each engine runs one when it opens its memory meter.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' rates and residuals out of the user's cache."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _no_leaked_variables() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = (set(before) | set(after)) - _NOT_OURS
    changed = sorted(name for name in names if before.get(name) != after.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left these environment variables changed: {changed}"


@pytest.fixture(autouse=True)
def _no_leaked_group() -> Iterator[None]:
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")
