"""What every test gets: a seed, and the proof that it left nothing behind."""

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
pytest_plugins = ["support.full"]

# Set by pytest itself while a test runs, or by torch for good the first time CUDA is asked about.
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
    """Collect the tests without collecting garbage: all that is imported and made here stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would the programs that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_is_no_garbage() -> None:
    """Take what is there when a module's tests begin out of the garbage collector's sight.

    A collection visits every object of torch, of bigtrain and of thousands of collected tests: a
    third of a second, which each engine pays as it opens its memory meter.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates and residuals of the tests do not become the user's."""
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
