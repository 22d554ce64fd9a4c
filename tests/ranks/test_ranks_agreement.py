"""Ranks that were started differently are refused before training, with the key and both values."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.ranks import RankFailure, run_ranks
from support.zygote import interpreter, surroundings
from torch import nn

from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.launcher_env import LAUNCH_VARIABLE

TRAIN = Path(__file__).parents[2] / "bigtrain" / "train.py"


def net(width: int = 8, dropout: float = 0.0, layers: int = 1) -> nn.Module:
    more = [nn.Linear(width, width) for _ in range(layers - 1)]
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), *more, nn.Linear(width, 3))


def by_name(parameters):
    first, *biases = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": biases}], lr=0.01)


SGD = functools.partial(torch.optim.SGD, lr=0.1)
DIFFERENCES = {
    "width": ({"model": functools.partial(net, 9)}, "module 0 is .*Linear.in_features=4, out_fea"),
    "a layer": (
        {"model": functools.partial(net, layers=2)},
        "module 2 is .*=8.* and .*=3.*; module 3 is .* and not there",
    ),
    "dropout": ({"model": functools.partial(net, dropout=0.5)}, "module 1 is .*p=0.5.* and .*p=0"),
    "rate": ({"optimizer": functools.partial(torch.optim.SGD, lr=0.2)}, "lr of optimizer group 0"),
    "optimizer": ({"optimizer": torch.optim.Adam}, "optimizer is Adam on rank 1 and SGD on rank 0"),
    "groups": ({"optimizer": by_name}, "parameters of optimizer group 0 is 1 .* and 4 "),
    "loss": ({"loss": F.mse_loss}, "loss is torch.nn.functional.mse_loss on rank 1 and torch"),
    "precision": ({"keys": {"train.precision": "bf16"}}, "train.precision is bf16 on rank 1 and "),
    "clipping": ({"keys": {"optim.clip_norm": 1.0}}, "optim.clip_norm is 1.0 on rank 1 and null"),
    "strategy": ({"strategy": "fsdp"}, "strategy.name is fsdp on rank 1 and ddp on rank 0; "),
}


def build_differently(context, name):
    arguments = {
        "model": net,
        "optimizer": SGD,
        "loss": F.cross_entropy,
        "strategy": "ddp",
        "keys": {},
    }
    if context.rank == 1:
        arguments |= DIFFERENCES[name][0]
    job = job_from_keys(arguments["strategy"], arguments["keys"])
    Engine(arguments["model"], arguments["loss"], arguments["optimizer"], job, context).close()


@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_engine_of_one_rank_that_differs_is_refused(name):
    with pytest.raises(RankFailure, match=DIFFERENCES[name][1]):
        run_ranks(build_differently, 2, name)


WORDS = ["data.name=digits", "model.name=lenet", "train.steps=1", "train.global_batch_size=8"]


def run_with_words(
    folder: Path, words: list[list[str]], places: tuple[str, str] = (".", ".")
) -> list[tuple[int, str]]:
    """Exit status and errors of the command on ranks that are started with these words and
    folders.
    """
    ranks = []
    for rank, folder_words in enumerate(words):
        environ = {
            **surroundings(),
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", LAUNCH_VARIABLE: str(folder / "launch")},
        }
        ranks.append(
            subprocess.Popen(
                [interpreter(), str(TRAIN), *WORDS, *folder_words],
                cwd=folder / places[rank],
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        return [(rank.wait(60), rank.stderr.read()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.stderr.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=0.3"], "optim.lr is 0.3 on rank 1 and 0.002 on rank 0"),
        (["train.seed=7"], "train.seed is 7 on rank 1 and 0 on rank 0"),
        (["mesh.pp=2", "--strategy", "gpipe"], "mesh.pp is 2 on rank 1 and null on rank 0; "),
        (["train.global_batch_size=16"], "train.global_batch_size is 16 on rank 1 and 8 on rank 0"),
        (["model.name=resnet18"], "model.name is resnet18 on rank 1 and lenet on rank 0; "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_command_is_refused_in_one_line_and_leaves_nothing(tmp_path, words, message):
    (zero, silence), (rank_1, line) = run_with_words(tmp_path, [[], words])
    assert (zero, rank_1) == (2, 2)
    assert "started differently" not in silence
    assert message in line
    assert line.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_data_of_another_length_is_refused(tmp_path):
    for folder, lines in (("a", 300), ("b", 400)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text("to be or not to be\n" * lines)
    words = ["data.name=text", "data.path=text.txt", "model.name=gpt", "model.args.num_layers=1"]
    words += ["model.args.width=16", "model.args.num_heads=2", "model.args.sequence_length=16"]
    (zero, _), (rank_1, line) = run_with_words(tmp_path, [words, words], ("a", "b"))
    assert (zero, rank_1) == (2, 2), line
    assert "training samples is " in line
