"""The global state of a process, compared to decide whether it may run another test.

Take `state()` before and after a call; `changes(before, after)` names the differences. Compared are
the globals of bigtrain, of the tests and of torch.distributed, the attributes of their classes and
of those torch classes that tests patch, and torch's switches. New modules and new names do not
count as changes, because a first import adds them.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from operator import is_
from pathlib import Path
from typing import Any

_WATCHED = ("bigtrain", "tests", "support", "golden")
"""In these packages every global and every class is compared."""
_PATCHED = (
    "torch",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.tensor",
    "torch.nn.functional",
    "torch.nn.utils",
    "torch.autograd",
    "torch.cuda",
    "torch.utils.checkpoint",
    "os",
    "time",
    "socket",
    "shutil",
)
"""In these modules functions and classes are compared; their other globals change in use."""
_CLASSES = (
    "torch.Tensor",
    "torch.nn.Module",
    "torch.nn.Linear",
    "torch.optim.Optimizer",
    "torch.autograd.Function",
    "torch.nn.parallel.DistributedDataParallel",
)
_CONTAINERS = (list, dict, set)
_PLAIN = (bool, int, float, str, list, bytes)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_PATIENCE_S = 0.5
_ROOT = Path(__file__).resolve().parents[2]


State = dict[str, dict[str, Any]]


def watched() -> list[str]:
    """The imported modules whose globals and classes are compared."""
    return [name for name in list(sys.modules) if name.partition(".")[0] in _WATCHED]


def state() -> State:
    """Return all compared values, by owner and name.

    The values themselves are stored, because an `id` may be reused for another object.
    """
    compared: State = {}
    for name in watched():
        compared[name] = attributes = dict(vars(sys.modules[name]))
        # Caches of bigtrain grow in use; its tables, in capitals, do not.
        is_cached = name.startswith("bigtrain")
        contents = compared[f"contents in {name}"] = {}
        for key, value in attributes.items():
            if type(value) in _CONTAINERS:
                if not key.startswith("__") and (key.isupper() or not is_cached):
                    contents[key] = tuple(value.values() if type(value) is dict else value)
            elif isinstance(value, type) and value.__module__ == name:
                compared[f"{name}.{value.__qualname__}"] = _attributes(value)
    for name in _PATCHED:
        compared[name] = {k: v for k, v in vars(sys.modules[name]).items() if callable(v)}
    for path in _CLASSES:
        compared[path] = _attributes(_at(path))
    return compared | {"": _switches()}


def _attributes(cls: type) -> dict[str, Any]:
    """Return a class's attributes; of an optimizer, `step` as it is before torch wraps it.

    torch wraps the method at the first optimizer of a class, once for the whole process.
    """
    attributes = dict(vars(cls))
    if getattr(attributes.get("step"), "hooked", False):
        attributes["step"] = attributes["step"].__wrapped__
    return attributes


def changes(before: State, after: State) -> list[str]:
    """Names whose values differ, and modules that were imported from outside this checkout."""
    named = []
    for owner, values in before.items():
        others = after.get(owner, values)
        # Thirty thousand values are compared after each call, and nearly all are the same objects.
        if len(values) == len(others) and all(map(is_, values.values(), others.values())):
            continue
        named += [
            f"{owner} {name}".strip()
            for name, value in values.items()
            if not _is_same(value, others.get(name))
        ]
    return sorted(named) + [f"module {name}" for name in sorted(_foreign_modules())]


def _is_same(before: Any, after: Any) -> bool:
    if type(before) is tuple and type(after) is tuple:  # the contents of a list, dict or set
        return len(before) == len(after) and all(map(is_, before, after))
    return before is after or (type(before) in _PLAIN and before == after)


def _at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


def _switches() -> dict[str, Any]:
    import torch
    from torch.nn.modules import module as modules

    hooks = {
        f"torch.nn.{name}": len(value)
        for name, value in vars(modules).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    }
    return hooks | {
        "a process group": torch.distributed.is_initialized(),
        "the default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "precision of matrix products": torch.get_float32_matmul_precision(),
        "the threads": sorted(_threads()),
        "limits of the system": [resource.getrlimit(number) for number in _LIMITS],
        "the hook of threads": threading.excepthook,
        "the signals": [signal.getsignal(number) for number in _SIGNALS],
    }


def _threads() -> list[str]:
    """Names of the running threads, after a short wait for threads that are about to end."""
    until = time.monotonic() + _PATIENCE_S
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.002)
    return [thread.name for thread in threading.enumerate()]


def _foreign_modules() -> list[str]:
    """Modules that a test wrote into a temporary folder: the next test may write a
    different one.
    """
    places = {str(_ROOT), sys.prefix, sys.base_prefix}
    return [
        name
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None))
        and str(file).startswith("/")
        and not any(str(file).startswith(prefix) for prefix in places)
        and "/site-packages/" not in str(file)
    ]
