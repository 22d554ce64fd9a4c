"""The scripts benchmarks/damages.py and benchmarks/hostile_inputs.py, loaded as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from support.programs import ROOT


def _benchmark(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


damages = _benchmark("damages")
hostile_inputs = _benchmark("hostile_inputs")
