"""No garbage collection while the project's files are parsed: it would take most of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _parse_without_collections() -> Iterator[None]:
    """The syntax trees of 900 files are a million objects, and each collection visits them all."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()
