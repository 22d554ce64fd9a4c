"""Environment variables that contain numbers or JSON."""

from __future__ import annotations

import pytest

from bigtrain.errors import UnreadableError
from bigtrain.files.environment import count_in, json_in


@pytest.mark.parametrize("text", ["", " ", "-1", "1.5", "x", "²", "٣", "1e3", "9" * 5000, "1 2"])
def test_what_is_no_count(text: str) -> None:
    assert count_in(text) is None


def test_counts() -> None:
    assert count_in(" 12 ") == 12
    assert count_in("0") == 0
    assert count_in("10000001") is None
    assert count_in("10000001", most=1 << 40) == 10_000_001


@pytest.mark.parametrize("text", ["", "x", "[]", "5", "[" * 50_000, '{"a": 1, "a": 1}', "\ud800"])
def test_what_is_no_object(text: str) -> None:
    with pytest.raises(UnreadableError, match=r"^NAME=.* cannot be read: .* Run: unset NAME$"):
        json_in({"NAME": text}, "NAME")


def test_an_object() -> None:
    assert json_in({"NAME": '{"a": 1}'}, "NAME") == {"a": 1}
    assert json_in({}, "NAME") is None
