"""Text as sequences of bytes: joined files, the cache, validation and refusals."""

import io
import math
import os
import pickle
import resource
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from bigtrain.data import check_data, open_data, prepare_data
from bigtrain.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bigtrain"


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "corpus"
    (root / "deep").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.txt").write_bytes(b"a" * 700)
    (root / "deep" / "b.md").write_bytes(bytes(range(256)) * 4)
    (root / "c.bin").write_bytes(b"c" * 50)
    (root / "empty.txt").write_bytes(b"")
    (root / ".hidden" / "d.txt").write_bytes(b"d" * 50)
    return root


def opened(path, models_length=None, **args):
    path = str(path) if path else None
    return open_data("text", path, args, seed=0, sequence_length=models_length)


def content(samples):
    """The bytes of all samples, and the target of the last one."""
    inputs = b"".join(bytes(samples[i][0].tolist()) for i in range(len(samples)))
    return inputs + bytes(samples[len(samples) - 1][1][-1:].tolist())


def test_samples_are_consecutive_and_shifted_by_one(tmp_path):
    text = bytes(np.random.default_rng(0).integers(0, 256, 1001, dtype=np.uint8))
    (tmp_path / "x.dat").write_bytes(text)
    data = opened(tmp_path / "x.dat", 10)
    cut = 1001 - 50
    assert len(data.train) == (cut - 1) // 10 == 95
    assert content(data.train) == text[:951]
    assert content(data.validation) == text[cut : cut + 41]
    for index in (0, 3, 94):
        inputs, targets = data.train[index]
        assert (inputs.dtype, inputs.shape) == (torch.int64, (10,))
        assert bytes(inputs.tolist()) == text[index * 10 : index * 10 + 10]
        assert bytes(targets.tolist()) == text[index * 10 + 1 : index * 10 + 11]
    many = data.train.__getitems__([94, 0, 0, 7])
    for (inputs, targets), index in zip(many, [94, 0, 0, 7], strict=True):
        assert torch.equal(inputs, data.train[index][0])
        assert torch.equal(targets, data.train[index][1])
    with pytest.raises(IndexError):
        data.train[95]


def test_a_single_file_needs_no_cache(tmp_path, cache):
    (tmp_path / "x.txt").write_bytes(b"x" * 500)
    prepare_data("text", str(tmp_path / "x.txt"), {"sequence_length": 8})
    assert opened(tmp_path / "x.txt", 8).train
    assert not cache.exists()


def test_sequence_length_comes_from_the_argument_the_model_or_the_default(folder):
    assert opened(folder, 10).train[0][0].shape == (10,)
    assert opened(folder, 10, sequence_length=7).train[0][0].shape == (7,)
    assert opened(folder, validation_fraction=0.2).train[0][0].shape == (128,)


def test_a_folder_is_joined_once_in_a_fixed_order(folder, cache):
    for _ in range(2):
        prepare_data("text", str(folder), {})
    (joined,) = cache.iterdir()
    whole = joined.read_bytes()
    a, b = (folder / "a.txt").read_bytes(), (folder / "deep" / "b.md").read_bytes()
    assert whole in (a + b, b + a)
    before = joined.stat().st_mtime_ns
    data = opened(folder, 8, validation_fraction=0)
    assert joined.stat().st_mtime_ns == before
    assert content(data.train) == whole[: len(data.train) * 8 + 1]
    assert data.validation is None
    assert data.baseline == {}
    assert "2 files" in data.description


def test_changed_files_or_a_damaged_cache_are_joined_again(folder, cache):
    prepare_data("text", str(folder), {})
    (folder / "a.txt").write_bytes(b"z" * 701)
    prepare_data("text", str(folder), {})
    assert len(list(cache.iterdir())) == 2
    for joined in cache.iterdir():
        joined.write_bytes(b"short")
    assert b"z" * 600 in content(opened(folder, 4).train)


def test_pattern_chooses_the_files(folder):
    assert set(content(opened(folder, 4, pattern="*.bin", validation_fraction=0).train)) == {
        ord("c")
    }
    assert set(content(opened(folder, 4, pattern="deep/*", validation_fraction=0).train)) == set(
        range(256)
    )
    assert "4 files" not in opened(folder, 4, pattern="*").description
    assert "3 files" in opened(folder, 4, pattern="*").description


@pytest.mark.parametrize("pattern", ["", "/etc/*", "../*"])
def test_a_pattern_that_leaves_the_folder_is_refused(folder, pattern):
    with pytest.raises(ConfigError, match=r"data\.args\.pattern=.* must be a glob relative"):
        check_data("text", str(folder), {"pattern": pattern})


def test_without_a_path_it_is_the_python_library(tmp_path, monkeypatch):
    library = tmp_path / "python"
    (library / "site-packages").mkdir(parents=True)
    (library / "one.py").write_bytes(b"1" * 300)
    (library / "two.py").write_bytes(b"2" * 300)
    (library / "notes.txt").write_bytes(b"n" * 300)
    (library / "site-packages" / "other.py").write_bytes(b"3" * 300)
    check_data("text", None, {})  # the real one
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    data = opened(None, 8)
    assert set(content(data.train)) == {ord("1"), ord("2")}
    assert data.task.name == "language"


def test_the_baseline_is_the_cross_entropy_of_byte_frequencies(tmp_path):
    train, held_out = b"ab" * 450 + b"c" * 50, b"aab" * 16 + b"zz"
    (tmp_path / "x.txt").write_bytes(train + held_out)
    data = opened(tmp_path / "x.txt", 8, validation_fraction=0.05)
    odds = [(train.count(byte) + 1) / (950 + 256) for byte in range(256)]
    expected = -sum(math.log2(odds[byte]) for byte in held_out) / 50
    assert data.baseline == pytest.approx({"bits_per_byte": expected})
    constant = torch.tensor([[math.log(odd) for odd in odds]])
    _, targets = data.validation[0]
    figures = data.task.summarize(data.task.measure(constant.expand(8, -1)[None], targets[None]))
    part = -sum(math.log2(odds[byte]) for byte in targets.tolist()) / 8
    assert figures["bits_per_byte"] == pytest.approx(part, rel=1e-6)


def test_a_long_text_is_counted_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("bigtrain.data.text._BLOCK", 100)
    monkeypatch.setattr("bigtrain.data.text._BASELINE_BLOCKS", 7)
    (tmp_path / "x.txt").write_bytes(b"abcd" * 2000)
    data = opened(tmp_path / "x.txt", 8)
    assert data.baseline["bits_per_byte"] == pytest.approx(-math.log2(176 / (700 + 256)), rel=0.01)


def test_validation_is_capped_and_evenly_spread(tmp_path):
    text = bytes(range(200)) * 10
    (tmp_path / "x.txt").write_bytes(text)
    data = opened(tmp_path / "x.txt", 2, validation_fraction=0.5, validation_samples=4)
    assert [int(data.validation[i][0][0]) for i in range(4)] == [0, 48, 98, 148]
    assert [int(x[0]) for x, _ in data.validation.__getitems__([3, 0])] == [148, 0]
    assert len(opened(tmp_path / "x.txt", 2, validation_samples=9999).validation) == 49


def test_samples_pickle_by_path(tmp_path):
    (tmp_path / "x.txt").write_bytes(os.urandom(100_000))
    data = opened(tmp_path / "x.txt", 16)
    packed = pickle.dumps(data.train)
    assert len(packed) < 1000
    assert content(pickle.loads(packed)) == content(data.train)


def test_an_unwritable_cache_falls_back_to_the_temporary_folder(folder, cache, monkeypatch):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    temporary = folder.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert opened(folder, 8).train
    (made,) = temporary.iterdir()
    assert made.name == f"bigtrain-{os.getuid()}"
    (made / next(made.iterdir()).name).unlink()
    made.rmdir()
    made.write_text("here too")
    message = r"needs a cache of 1\.7 KiB.*(File exists|Not a directory).*Set XDG_CACHE_HOME"
    with pytest.raises(ConfigError, match=message):
        prepare_data("text", str(folder), {})


def test_a_relative_cache_home_is_not_used(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare_data("text", str(folder), {})
    assert list((tmp_path / "home" / ".cache" / "bigtrain").glob("text-*.bin"))


def test_nothing_half_built_is_left(folder, cache, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"File too large"):
            prepare_data("text", str(folder), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(("content", "how"), [(b"12345", "shorter"), (b"1" * 9999, "longer")])
def test_files_that_change_meanwhile_are_refused(folder, cache, monkeypatch, content, how):
    monkeypatch.setattr("bigtrain.data.text.open_regular", lambda _: io.BytesIO(content))
    with pytest.raises(ConfigError, match=rf"changed while they were read: .*txt is {how} than"):
        prepare_data("text", str(folder), {})
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("hole", ["alone", "beside"])
def test_a_cache_that_would_fill_the_disk_is_refused_with_its_largest_file(folder, cache, hole):
    with (folder / "hole.txt").open("wb") as file:
        file.truncate(2 << 40)
    if hole == "alone":  # it is mapped where it is
        opened = open_data("text", str(folder / "hole.txt"), {}, seed=0)
        assert "2.00 TiB of 1 files" in opened.description
        return
    with pytest.raises(ConfigError) as caught:
        prepare_data("text", str(folder), {})
    message = str(caught.value)
    assert "needs a cache of 2.00 TiB" in message
    assert "are free)" in message
    assert "the largest is hole.txt with 2.00 TiB, of which 0 B are written" in message
    assert [path.name for path in cache.rglob("*") if path.is_file()] == []
    prepare_data("text", str(folder), {"pattern": "[ab]*.txt"})


def test_the_draft_of_a_process_that_was_killed_is_removed_by_the_next(folder, cache):
    begun = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from bigtrain.files.drafts import replacing_file
        with replacing_file(Path({str(cache)!r}) / "text-x.bin") as file:
            file.write(b"half")
            file.flush()
            print("begun", flush=True)
            signal.pause()
    """)
    process = subprocess.Popen([sys.executable, "-c", begun], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"begun\n"
    drafts = [path for path in cache.iterdir() if ".draft-" in path.name]
    assert len(drafts) == 1
    prepare_data("text", str(folder), {})  # the process is still alive, so its draft stays
    assert drafts[0].exists()
    process.kill()
    process.communicate()
    (folder / "a.txt").write_text("another text, so that another cache is made")
    prepare_data("text", str(folder), {})
    assert not drafts[0].exists()
    assert all(path.name.startswith("text-") for path in cache.iterdir())


def test_an_unreadable_file_is_named(folder, monkeypatch):
    real = os.open

    def refuse(path, *args, **options):
        if Path(path).name == "a.txt":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"data\.path: cannot read .*a\.txt: Permission denied"):
        prepare_data("text", str(folder), {})


def test_too_little_text_is_refused_with_numbers(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"x" * 100)
    (tmp_path / "one.txt").write_bytes(b"x")
    message = r"has 100 bytes, 95 of them for training; one sample needs .* = 129\. .*length=94"
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "x.txt")
    message = r"5 of them held out.* = 11\. .*sequence_length=4 or data\.args\.validation_fraction"
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "x.txt", 10)
    with pytest.raises(ConfigError, match=r"has 1 bytes, 1 .* = 9\. Give more text\.$"):
        opened(tmp_path / "one.txt", 8, validation_fraction=0)


def test_missing_or_empty_text_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"data\.path: .*nowhere does not exist.*leave data\.pa"):
        check_data("text", str(tmp_path / "nowhere"), {})
    message = r"no bytes to read in 0 matching files \(pattern: \*\.tex\).*pattern='\*'"
    with pytest.raises(ConfigError, match=message):
        check_data("text", str(folder), {"pattern": "*.tex"})
    with pytest.raises(ConfigError, match=r"in 1 matching files"):
        check_data("text", str(folder / "empty.txt"), {})
