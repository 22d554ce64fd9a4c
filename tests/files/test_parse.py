"""JSON and YAML with bounds: huge expansions, deep nesting and duplicate keys are refused
quickly.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from bigtrain.errors import UnreadableError
from bigtrain.files.parse import MOST_DEPTH, parse_json, parse_yaml, read_json_object

DEEP = 100_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * DEEP, "nested more than 64 deep"),
        ("[" * DEEP + "]" * DEEP, "nested more than 64 deep"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "nested more than 64 deep"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ('{"a": 1, "a": 2}', r"it has the key 'a' twice"),
        ('{"b": [{"\\u0061": 1, "a": 2}]}', r"it has the key 'a' twice"),
        ('{"a": "\\ud800"}', "half of a character"),
        ('{"\\udfff": 1}', "half of a character"),
        ("9" * 5000, "Exceeds the limit"),
        ("", "it is not JSON"),
        ("{'a': 1}", "it is not JSON"),
        ("1 2", "it is not JSON"),
        (b"\xff\xfe\x00", "decode"),
        (b'"\xff"', "decode"),
    ],
)
def test_json_that_is_refused(text: str | bytes, reason: str) -> None:
    began = time.monotonic()
    with pytest.raises(UnreadableError, match=reason) as caught:
        parse_json(text, "some.json", "Make it anew.")
    assert time.monotonic() - began < 5
    message = str(caught.value)
    assert message.startswith("some.json cannot be read: ")
    assert message.endswith(". Make it anew.")
    assert "\n" not in message
    message.encode()


def test_json_that_is_read(tmp_path: Path) -> None:
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH, "") != []
    assert parse_json('{"a": "\\ud83d\\ude00", "b": [1, null, true]}', "")["b"] == [1, None, True]
    path = tmp_path / "some.json"
    path.write_text('{\n"a": 1,\n"b" 2}')
    with pytest.raises(UnreadableError, match=r"some\.json:3 cannot be read: it is not JSON"):
        read_json_object(path)
    path.write_text("[1]")
    with pytest.raises(UnreadableError, match="it holds list, and a JSON object is needed"):
        read_json_object(path)


def bomb(levels: int, width: int, flavour: str) -> str:
    lines = ["a0: &a0 [x, y]" if flavour == "list" else "a0: &a0 {x: 1, y: 2}"]
    for n in range(1, levels):
        inner = [f"*a{n - 1}"] * width
        value = f"[{', '.join(inner)}]"
        if flavour == "map":
            value = "{" + ", ".join(f"k{k}: {alias}" for k, alias in enumerate(inner)) + "}"
        elif flavour == "merge":
            value = f"{{<<: {value}}}"
        lines.append(f"a{n}: &a{n} {value}")
    return "\n".join(lines)


@pytest.mark.parametrize("flavour", ["list", "map", "merge"])
@pytest.mark.parametrize(("levels", "width"), [(6, 9), (9, 9), (25, 9), (60, 2)])
def test_aliases_that_stand_for_too_much(flavour: str, levels: int, width: int) -> None:
    began = time.monotonic()
    with pytest.raises(yaml.YAMLError, match="aliases expand to more than 10,000 values"):
        parse_yaml(bomb(levels, width, flavour))
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 2020-99-99", "'2020-99-99' is no timestamp"),
        ("a: !!int abc", "'abc' is no int"),
        ("a: !!float abc", "'abc' is no float"),
        ("a: !!bool abc", "'abc' is no bool"),
        ("a: !!timestamp abc", "'abc' is no timestamp"),
        ("a: " + "9" * 5000, "is no int"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("[" * 500, "nested more than 64 deep"),
        ("[" * DEEP, "nested more than 64 deep"),
        ("a:\n" + "".join(" " * n + "- \n" for n in range(1, 90)), "nested more than 64 deep"),
        ("a: &a [*a]", "a value is inside of itself"),
        ("a: &a {b: {c: *a}}", "a value is inside of itself"),
        ('a: "\\0"', "it has a NUL"),
        ('"a\\0b": 1', "it has a NUL"),
        ('a: "\\ud800"', "half of a character"),
        ("a: {[1]: 2}", "found unhashable key"),
        ("a: \x07", "special characters are not allowed"),
        ("--- a\n--- b", "expected a single document"),
        ("a: *b", "found undefined alias"),
    ],
)
def test_yaml_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(yaml.YAMLError, match=reason):
        parse_yaml(text)


def test_yaml_that_is_read() -> None:
    root, values = parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\nd: 2020-01-02\ne: ü")
    assert root is not None
    assert values["b"] == {"x": 1}
    assert values["c"] == {"x": 1, "y": 2}
    assert values["e"] == "ü"
    assert parse_yaml("") == (None, None)
    assert parse_yaml("- 1")[1] == [1]
    shared = parse_yaml("a: &a [" + ", ".join("x" * 20) + "]\nb: [" + ", ".join(["*a"] * 400) + "]")
    assert len(shared[1]["b"]) == 400
