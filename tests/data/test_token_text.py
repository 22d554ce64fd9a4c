"""Text with a tokenizer: documents, answers, windows, the cache, and what is refused."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tokenizers_made import (
    LAST_DIFFERS,
    MARKED,
    PLAIN,
    chat,
    loaded,
    make_tokenizer,
    write_lines,
)

from bigtrain.data import check_data, open_data, prepare_data
from bigtrain.data.tokens import token_text
from bigtrain.data.tokens.records import read_text_parts
from bigtrain.data.tokens.windows import IGNORED_TARGET, Pieces, packed
from bigtrain.errors import ConfigError

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bigtrain"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def inner(tokenizer):
    return loaded(tokenizer)


def opened(path: Path | None, tokenizer: str, **args: Any):
    args = {"tokenizer": tokenizer, "validation_fraction": 0, "sequence_length": 32, **args}
    return open_data("text", None if path is None else str(path), args, seed=0)


def lines(tmp_path: Path, *records: Any) -> Path:
    return write_lines(tmp_path / "data.jsonl", records)


def documents(data: Any) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each sample, without the padding on the right."""
    found = []
    for index in range(len(data.train)):
        inputs, targets = data.train[index]
        assert inputs.dtype == targets.dtype == torch.int64
        pieces = data.train.layout.order[data.train.layout.bounds[index] :][:1]
        size = int(data.train.pieces.sizes[pieces[0]])
        assert set(targets[size:].tolist()) <= {IGNORED_TARGET}
        found.append((inputs[:size].tolist(), targets[:size].tolist()))
    return found


def answers(data: Any, inner: Any) -> list[str]:
    """The text of the targets that count, of each sample."""
    return [
        inner.decode([token for token in targets if token != IGNORED_TARGET])
        for _, targets in documents(data)
    ]


def test_texts_are_documents_that_end(tmp_path, tokenizer, inner):
    data = opened(lines(tmp_path, {"text": "hello world"}, {"text": "one two"}), tokenizer)
    end = inner.eos_token_id
    for (inputs, targets), text in zip(documents(data), ("hello world", "one two"), strict=True):
        whole = [*inner(text)["input_ids"], end]
        assert (inputs, targets) == (whole[:-1], whole[1:])
    assert data.task.num_classes == len(inner)
    assert len(data.train) == 2


def test_a_tokenizer_that_begins_texts_does_so_once(tmp_path):
    folder = make_tokenizer(tmp_path / "starts", starts=True)
    inner = loaded(folder)
    path = lines(tmp_path, {"text": "one"}, {"prompt": "two", "response": "three"})
    first, second = (inputs for inputs, _ in documents(opened(path, folder)))
    assert first == inner("one")["input_ids"]
    assert second == [
        *inner("two")["input_ids"],
        *inner("three", add_special_tokens=False).input_ids,
    ]


@pytest.mark.parametrize("answer", ["response", "completion"])
def test_only_the_response_counts(tmp_path, tokenizer, inner, answer):
    path = lines(tmp_path, {"prompt": "what is this", answer: " hello world"})
    data = opened(path, tokenizer)
    ((inputs, targets),) = documents(data)
    asked, said = (inner(text)["input_ids"] for text in ("what is this", " hello world"))
    assert inputs == asked + said
    assert targets == [IGNORED_TARGET] * (len(asked) - 1) + [*said, inner.eos_token_id]
    everything = opened(path, tokenizer, loss_on="everything")
    assert documents(everything) == [(inputs, [*inputs[1:], inner.eos_token_id])]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (("hello", "world"), "world<|im_end|>"),
        (("one", "two \n", "three", "four"), "two \n<|im_end|>four<|im_end|>"),
        (("one", "two", "three"), "two<|im_end|>"),
    ],
)
def test_only_the_turns_of_the_assistant_count(tmp_path, template, turns, said):
    folder = make_tokenizer(tmp_path / "tokenizer", template)
    inner = loaded(folder)
    data = opened(lines(tmp_path, chat(*turns)), folder, sequence_length=64)
    assert answers(data, inner) == [said]
    ((inputs, targets),) = documents(data)
    rendered = inner.apply_chat_template(chat(*turns)["messages"], return_dict=False)
    assert inputs == rendered[:-1]
    assert all(
        target in (IGNORED_TARGET, token)
        for target, token in zip(targets, rendered[1:], strict=True)
    )
    how = "marked by the chat template" if template is MARKED else "found by rendering each turn"
    assert f"1 conversations with answers {how}" in data.description


def test_an_answer_may_come_first_or_end_with_nothing_special(tmp_path):
    template = "{% for m in messages %}{{m['role'][0] + ':' + m['content'] + '\n'}}{% endfor %}"
    folder = make_tokenizer(tmp_path / "tokenizer", template)
    begins = {"messages": [{"role": "assistant", "content": "one"}]}
    data = opened(lines(tmp_path, chat("one", "two"), begins), folder)
    inner = loaded(folder)
    assert answers(data, inner) == ["a:two\n", "one\n"]


FAMILIES = {
    "a system turn by default": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
        "{{'<|im_start|>system\nhelps<|im_end|>\n'}}{% endif %}"
        "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}",
        "world<|im_end|>four<|im_end|>",
    ),
    "instructions in brackets": (
        "{{'<s>'}}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{'[INST] ' + m['content'] + ' [/INST]'}}{% else %}"
        "{{' ' + m['content'] + '</s>'}}{% endif %}{% endfor %}",
        " world</s> four</s>",
    ),
    "no beginning of an answer": (
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + "
        "'<|im_end|>\n'}}{% endfor %}",
        "<|im_start|>assistant\nworld<|im_end|><|im_start|>assistant\nfour<|im_end|>",
    ),
    "an empty thought before an answer": (
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n'}}"
        "{% if m['role'] == 'assistant' %}{{'<think></think>'}}{% endif %}"
        "{{m['content'] + '<|im_end|>\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}",
        "<think></think>world<|im_end|><think></think>four<|im_end|>",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_found_in_templates_of_several_families(tmp_path, family):
    template, said = FAMILIES[family]
    folder = make_tokenizer(tmp_path / "tokenizer", template)
    path = lines(tmp_path, chat("hello", "world", "three", "four"))
    assert answers(opened(path, folder, sequence_length=128), loaded(folder)) == [said]


def test_long_documents_are_dropped_and_counted_or_split(tmp_path, tokenizer, inner):
    fits, longer = {"text": "a" * 8}, {"text": "bcd" * 7}
    path = lines(tmp_path, fits, longer, fits)
    data = opened(path, tokenizer, sequence_length=8)
    assert [inputs for inputs, _ in documents(data)] == [inner("a" * 8)["input_ids"]] * 2
    assert "LEFT OUT: 1 documents longer than 8 tokens (up to 21; data.args.long=split" in (
        data.description
    )
    split = opened(path, tokenizer, sequence_length=8, long="split")
    assert len(split.train) == 5
    whole = [*inner("bcd" * 7)["input_ids"], inner.eos_token_id]
    found = documents(split)[1:4]
    assert [inputs for inputs, _ in found] == [whole[0:8], whole[8:16], whole[16:21]]
    assert [targets for _, targets in found] == [whole[1:9], whole[9:17], whole[17:22]]
    assert "LEFT OUT" not in split.description


def test_documents_and_pieces_without_an_answer_are_counted(tmp_path, tokenizer):
    asked = {"prompt": "x" * 20, "response": "two"}
    path = lines(tmp_path, chat("hello"), {"text": ""}, asked)
    data = opened(path, tokenizer, sequence_length=8, long="split")
    assert len(data.train) == 1
    assert "2 documents without an answer left out" in data.description
    assert "2 pieces without an answer left out" in data.description
    everything = opened(path, tokenizer, sequence_length=8, long="split", loss_on="everything")
    assert len(everything.train) == 3 + 1


def test_plain_text_is_a_document_and_its_rest_is_kept(tmp_path, tokenizer, inner):
    text = "hello world, one two\n" * 9
    (tmp_path / "a.txt").write_text(text)
    whole = [*inner(text)["input_ids"], inner.eos_token_id]
    data = opened(tmp_path / "a.txt", tokenizer, sequence_length=10)
    found = documents(data)
    assert sum((inputs for inputs, _ in found), []) == whole[:-1]
    assert sum((targets for _, targets in found), []) == whole[1:]
    assert 0 < len(found[-1][0]) < 10
    half = opened(tmp_path / "a.txt", tokenizer, sequence_length=10, validation_fraction=0.5)
    cut = len(whole) - round(len(whole) * 0.5)
    train = sum((inputs for inputs, _ in documents(half)), [])
    assert train == whole[: cut - 1]
    inputs, targets = half.validation[0]
    assert inputs.tolist() == whole[cut : cut + 10]
    assert targets.tolist() == whole[cut + 1 : cut + 11]


@pytest.mark.parametrize(
    "text", ["é" * 999 + "\n" + "x" * 50, "word " * 500, "\n" * 300, "", "€" * 7]
)
@pytest.mark.parametrize("part", [1, 2, 7, 64, 10_000])
def test_the_parts_of_a_file_are_its_text(tmp_path, text, part):
    path = tmp_path / "a.txt"
    path.write_text(text, newline="")
    found = list(read_text_parts(path, lenient=False, part_bytes=part))
    assert "".join(p.text for p, _ in found) == text
    assert sum(size for _, size in found) == len(text.encode())
    assert [p.is_last for p, _ in found] == [False] * (len(found) - 1) + [True]


def test_the_last_records_or_a_file_of_its_own_are_held_out(tmp_path, tokenizer, inner):
    path = lines(tmp_path, *({"text": f"{n}"} for n in range(40)))
    data = opened(path, tokenizer, validation_fraction=0.1)
    assert (len(data.train), len(data.validation)) == (36, 4)
    held_out = [inner.decode(data.validation[n][0][:2]) for n in range(4)]
    assert held_out == ["36", "37", "38", "39"]
    assert "36 documents for training, 4 held out" in data.description
    other = write_lines(tmp_path / "other.jsonl", [{"text": "six"}])
    data = opened(path, tokenizer, validation_fraction=0.1, validation_path=str(other))
    assert (len(data.train), len(data.validation)) == (40, 1)
    few = opened(path, tokenizer, validation_fraction=0.5, validation_samples=3)
    assert [inner.decode(few.validation[n][0][:2]) for n in range(3)] == ["20", "26", "33"]


def test_a_folder_with_json_lines_is_read_for_these_alone(tmp_path, tokenizer):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "README.md").write_text("not a document")
    write_lines(folder / "a.jsonl", [{"text": "one"}])
    write_lines(folder / "b.ndjson", [{"text": "two"}, {"text": "three"}])
    assert len(opened(folder, tokenizer).train) == 3
    assert len(opened(folder, tokenizer, pattern="*.md").train) == 1


def test_the_library_of_python_is_read_without_a_path(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "odd.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "python")})
    assert len(opened(None, tokenizer).train) == 1


# ---- windows


def test_packing_puts_every_piece_in_a_window_with_room():
    sizes = np.random.default_rng(0).integers(1, 33, 500)
    pieces = Pieces(np.cumsum(sizes) - sizes, sizes)
    layout = packed(pieces, 64)
    assert sorted(layout.order.tolist()) == list(range(500))
    filled = [
        int(sizes[layout.order[a:b]].sum())
        for a, b in zip(layout.bounds[:-1], layout.bounds[1:], strict=True)
    ]
    assert max(filled) <= 64
    assert len(layout) <= -(-int(sizes.sum()) // 64) * 1.02
    assert packed(Pieces(pieces.starts[:0], sizes[:0]), 64).bounds.tolist() == [0]


def test_a_packed_sample_keeps_documents_apart(tmp_path, tokenizer):
    records = [{"prompt": "one", "response": "t" * n} for n in (3, 5, 2, 7)]
    data = opened(lines(tmp_path, *records), tokenizer, packing=True, sequence_length=16)
    samples = data.train.with_masks("documents")
    assert len(samples) == len(data.train) == 2
    for index in range(2):
        inputs, targets = samples[index]
        mask, place = inputs["attention_mask"], inputs["position_ids"]
        assert (mask.dtype, mask.shape) == (torch.bool, (1, 16, 16))
        starts = [n for n in range(16) if place[n] == 0]
        for begin, end in zip(starts, [*starts[1:], 16], strict=True):
            assert torch.equal(
                mask[0, begin:end, begin:end], torch.ones(end - begin, end - begin).tril() > 0
            )
            assert not mask[0, begin:end, :begin].any()
            assert not mask[0, begin:end, end:].any()
            assert place[begin:end].tolist() == list(range(end - begin))
        assert mask.any(-1).all()  # a row without a token would be nan
        assert (targets != IGNORED_TARGET).sum() > 0
    near = data.train.with_masks("documents", 2)[0][0]["attention_mask"]
    assert int(near.sum(-1).max()) == 2


# ---- the cache


def test_tokens_are_made_once_and_again_if_anything_changed(
    tmp_path, tokenizer, cache, monkeypatch
):
    path = lines(tmp_path, {"text": "one"}, {"text": "two"})
    made = []
    real = token_text.TokenText._documents
    monkeypatch.setattr(
        token_text.TokenText, "_documents", lambda self, *a: made.append(1) or real(self, *a)
    )
    prepare_data("text", str(path), {"tokenizer": tokenizer})
    for args in ({}, {"sequence_length": 8}, {"loss_on": "everything"}, {"packing": True}):
        opened(path, tokenizer, **args)
    assert len(made) == 1
    state = path.stat()
    write_lines(path, [{"text": "one"}, {"text": "six"}])  # as long, and as old
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    inner = loaded(tokenizer)
    assert "six" in inner.decode(opened(path, tokenizer).train[1][0])
    assert len(made) == 2
    other = make_tokenizer(tmp_path / "other", MARKED)
    opened(path, other)
    opened(path, tokenizer, ignore_fields=["id"])
    assert len(made) == 4
    assert len(list(cache.glob("tokens-*.bin"))) == 4
    assert not [name for name in os.listdir(cache) if ".draft-" in name]


@pytest.mark.parametrize("damage", ["empty", "short", "bit", "footer", "end"])
def test_a_damaged_cache_is_made_again(tmp_path, tokenizer, cache, damage, capfd):
    path = lines(tmp_path, {"text": "one two three"}, {"text": "two"})
    expected = documents(opened(path, tokenizer))
    (file,) = cache.glob("tokens-*.bin")
    whole = bytearray(file.read_bytes())
    if damage == "bit":
        whole[5] ^= 4
    elif damage == "footer":
        whole[-30] ^= 0xFF
    elif damage == "end":
        whole[-3] ^= 1
    file.write_bytes({"empty": b"", "short": whole[:40]}.get(damage, whole))
    assert documents(opened(path, tokenizer)) == expected
    assert "is damaged" in capfd.readouterr().err
    assert documents(opened(path, tokenizer)) == expected
    assert capfd.readouterr().err == ""


def test_contents_of_large_files_are_remembered_unless_they_are_new(
    tmp_path, tokenizer, monkeypatch
):
    path = lines(tmp_path, {"text": "one"})
    monkeypatch.setattr(token_text, "_REMEMBERED_BYTES", 0)
    hashed = []
    real = token_text._hash_of
    monkeypatch.setattr(token_text, "_hash_of", lambda files: hashed.append(1) or real(files))
    opened(path, tokenizer)
    opened(path, tokenizer)
    assert len(hashed) == 2  # it has just been written: it may change within the clock's tick
    os.utime(path, (1e9, 1e9))
    opened(path, tokenizer)
    opened(path, tokenizer)
    assert len(hashed) == 3


def _open_and_count(path: str, tokenizer: str, start: Any, results: Any) -> None:
    start.wait()
    made = []
    real = token_text.TokenText._documents
    token_text.TokenText._documents = lambda self, *a: made.append(1) or real(self, *a)
    data = opened(Path(path), tokenizer)
    results.put((len(made), len(data.train)))


def test_processes_that_begin_together_make_it_once(tmp_path, tokenizer):
    path = lines(tmp_path, *({"text": f"one {n}"} for n in range(3000)))
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(3), context.Queue()
    args = (str(path), tokenizer, start, results)
    processes = [context.Process(target=_open_and_count, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(found) == [(0, 3000), (0, 3000), (1, 3000)]


def test_samples_pickle_by_path(tmp_path, tokenizer):
    path = lines(tmp_path, *({"text": f"one two three {n}"} for n in range(300)))
    data = opened(path, tokenizer)
    again = pickle.loads(pickle.dumps(data.train))
    assert torch.equal(again[7][0], data.train[7][0])
    assert len(pickle.dumps(data.train.file)) < 500


def test_a_bar_is_shown_on_a_terminal_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with token_text.tokenizing_bar("FILE", 100) as advance:
            advance(40)
        assert ("FILE" in stream.getvalue()) == shown


# ---- refusals


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", r"data\.jsonl:2: it is not JSON \(.*\)\. Correct it, or leave the file out"),
        ("[1]", r"data\.jsonl:2 is a list, and a record is an object such as"),
        ('{"txt": "a"}', r":2 has the fields 'txt', and a record has 'text', or 'prompt' and"),
        ("{}", r":2 has the fields none, and a record"),
        ('{"prompt": "a"}', r":2 has the fields 'prompt', and a record has"),
        ('{"text": 3}', r":2: 'text' is a int, and a text is needed"),
        ('{"prompt": "a", "response": null}', r":2: 'response' is a NoneType, and a text"),
        (
            '{"text": "a", "id": 3}',
            r":2 has a field 'id', which .*'text' does not use.*ignore_fields=\[id\]",
        ),
        (
            '{"prompt": "a", "response": "b", "respons": "b"}',
            r"'respons', which .*'prompt' and 'response' does not use, did you mean 'response'\?",
        ),
        ('{"messages": []}', r":2: 'messages' is not usable: a list of objects with 'role'"),
        ('{"messages": [{"role": "user", "content": "a"}, 3]}', r":2: message 2 of 'messages' is"),
        ('{"text": "a", "text": "b"}', r":2: .*'text'.*twice|:2: .*text"),
    ],
)
def test_a_line_that_is_no_record_is_refused_with_its_number(tmp_path, tokenizer, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        opened(path, tokenizer)
    assert "\n" not in str(caught.value)


def test_fields_that_are_ignored_by_name_are_left_out(tmp_path, tokenizer):
    path = lines(tmp_path, {"text": "one", "id": 3, "url": None})
    assert len(opened(path, tokenizer, ignore_fields=["id", "url"]).train) == 1


def test_a_line_may_begin_with_a_byte_order_mark_or_be_blank(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n  \n{"text": "two"}')
    assert len(opened(path, tokenizer).train) == 2


@pytest.mark.parametrize(
    ("template", "record", "message"),
    [
        (None, chat("a", "b"), r":1 has messages, and the tokenizer .* has no chat template.*Set"),
        (LAST_DIFFERS, chat("a", "b", "c", "d"), r":1: the chat template .* message 2 is shown in"),
        ("{{ raise_exception('roles must alternate') }}", chat("a", "b"), r"roles must alternate"),
        (
            "{{ messages[7].content.x.y }}",
            chat("a", "b"),
            r"cannot show these messages: list object has no element 7",
        ),
    ],
)
def test_a_template_that_cannot_show_messages_is_refused(tmp_path, template, record, message):
    folder = make_tokenizer(tmp_path / "tokenizer", template)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(lines(tmp_path, record), folder)
    assert "\n" not in str(caught.value)


def test_documents_that_all_are_too_long_are_refused_with_numbers(tmp_path, tokenizer):
    path = lines(tmp_path, {"text": "x" * 40}, {"text": "y" * 20})
    message = (
        r"every document for training of .*data\.jsonl has more than sequence_length \+ 1 = 11 "
        r"tokens \(the shortest 21, the longest 41\)\. Set data\.args\.sequence_length=20 or more, "
        r"or data\.args\.long=split\."
    )
    with pytest.raises(ConfigError, match=message):
        opened(path, tokenizer, sequence_length=10)
    assert len(opened(path, tokenizer, sequence_length=20).train) == 1
    path = lines(tmp_path, *({"text": "x"} for _ in range(9)), {"text": "y" * 40})
    with pytest.raises(ConfigError, match=r"every document held out of"):
        opened(path, tokenizer, sequence_length=10, validation_fraction=0.1)
    path = lines(tmp_path, chat("hello"))
    with pytest.raises(ConfigError, match=r"no document for training .* has an answer \(1 without"):
        opened(path, tokenizer)


def test_empty_missing_or_odd_files_are_refused(tmp_path, tokenizer):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no bytes to read in 1 matching files"):
        check_data("text", str(empty), {"tokenizer": tokenizer})
    blank = tmp_path / "blank.jsonl"
    blank.write_bytes(b"\n \n")
    with pytest.raises(ConfigError, match=r"no document for training .*blank\.jsonl"):
        opened(blank, tokenizer)
    odd = tmp_path / "odd.txt"
    odd.write_bytes(b"caf\xe9 ")
    with pytest.raises(ConfigError, match=r"odd\.txt is not UTF-8 text \(.*Convert it, or leave"):
        opened(odd, tokenizer)
    path = lines(tmp_path, {"text": "one"})
    with pytest.raises(ConfigError, match=r"data\.args\.validation_path: .*nowhere does not exist"):
        check_data("text", str(path), {"tokenizer": tokenizer, "validation_path": "/nowhere"})


def test_tokenizers_that_are_none_are_refused(tmp_path, monkeypatch):
    path = lines(tmp_path, {"text": "one"})

    def refused(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            opened(path, name)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "bare").mkdir()
    assert "the folder has no file of a tokenizer, such as tokenizer.json" in refused(
        str(tmp_path / "bare")
    )
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    assert "transformers cannot make a tokenizer of these files" in refused(str(tmp_path / "bad"))
    assert "does not exist. Give a folder" in refused(str(tmp_path / "nowhere"))
    assert "is not a folder. Give a folder" in refused(str(path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "neither a folder nor in the hub's cache, and HF_HUB_OFFLINE is set" in refused(
        "nobody/nothing"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "needs transformers, which is not installed. Run: pip install 'bigtrain[hub]'" in (
        refused(str(tmp_path / "bare"))
    )


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"packing": True}, r"data\.args\.packing=true"),
        ({"long": "split"}, r"data\.args\.long=split"),
        ({"loss_on": "everything"}, r"data\.args\.loss_on=everything"),
        ({"ignore_fields": ["a"]}, r"'data\.args\.ignore_fields=\[a\]'"),
        ({"validation_path": "x"}, r"data\.args\.validation_path=x"),
        ({"packing": True, "tokenizer": "bytes"}, r"data\.args\.packing=true"),
    ],
)
def test_options_of_tokens_are_refused_for_bytes(args, word):
    with pytest.raises(
        ConfigError, match=word + r" is for documents .* Set data\.args\.tokenizer="
    ):
        check_data("text", None, args)


def test_the_tokenizer_of_a_model_of_the_hub_is_taken(tmp_path, tokenizer):
    path = str(lines(tmp_path, {"text": "one"}))
    args = {"validation_fraction": 0}
    check_data("text", path, args, f"hf:{tokenizer}")
    data = open_data("text", path, args, seed=0, model=f"hf:{tokenizer}")
    assert data.train[0][0].shape == (1024,)
    (Path(tokenizer) / "config.json").write_text('{"max_position_embeddings": 77}')
    assert open_data("text", path, args, seed=0, model=f"hf:{tokenizer}").train.length == 77
    (Path(tokenizer) / "config.json").unlink()
    for other in ("gpt", "mylib:Net", None):
        assert open_data(
            "text", path, {**args, "sequence_length": 4}, seed=0, model=other
        ).task.byte_level
    as_bytes = {**args, "tokenizer": "bytes", "sequence_length": 4}
    assert open_data("text", path, as_bytes, seed=0, model=f"hf:{tokenizer}").task.byte_level
    with pytest.raises(ConfigError, match=r"no file of a tokenizer"):
        check_data("text", path, args, f"hf:{tmp_path}")
    check_data("synthetic", None, {}, f"hf:{tokenizer}")
