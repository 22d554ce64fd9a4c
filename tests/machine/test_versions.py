"""Versions of drivers and libraries, read without importing a library."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.machine import versions


def test_the_driver_is_left_out_where_its_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (data, found) in enumerate(
        [(b"NVRM version: 575.1\n", {"driver": "NVRM version: 575.1"}), (b"\xff\xfe\x00", {})]
    ):
        path = tmp_path / str(number)
        path.write_bytes(data)
        monkeypatch.setattr(versions, "_DRIVER_MODULE", path)
        assert versions._driver() == found
    monkeypatch.setattr(versions, "_DRIVER_MODULE", tmp_path / "none")
    assert versions._driver() == {}
