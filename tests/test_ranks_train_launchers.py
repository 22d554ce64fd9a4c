"""train.py under every real launcher: two ranks train, agree, and leave one memory file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import find, free_port, slurm
from support.programs import ROOT, Finished, finish, run, start
from support.zygote import interpreter

pytestmark = pytest.mark.launcher

TRAIN = str(ROOT / "bigtrain" / "train.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm") / "run") as variables:
        yield variables


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    corpus.write_text("pack my box with five dozen liquor jugs. " * 300)
    return [
        f"data.path={corpus}",
        "model.args.num_layers=1",
        "MODEL.ARGS.WIDTH",
        "16",
        "model.args.num_heads=2",
        "data.args.sequence_length=16",
        "data.args.validation_samples=8",
        "train.global_batch_size=8",
        "train.steps=3",
    ]


def losses(folder: Path) -> list[float]:
    text = (folder / "r" / "metrics.jsonl").read_text()
    return [json.loads(line)["loss"] for line in text.splitlines()]


@pytest.fixture(scope="module")
def expected(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("single")
    done = run([interpreter(), TRAIN, *words, f"log.dir={folder}", "log.name=r"])
    assert done.status == 0, done.output
    return losses(folder)


def command(launcher: str, script: list[str]) -> list[str]:
    python = [sys.executable, *script]
    if launcher == "torchrun":
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            *script,
        ]
    if launcher == "deepspeed":
        port = str(free_port())
        return [find("deepspeed"), "--num_accelerators", "2", "--master_port", port, *script]
    if launcher == "srun":
        return [find("srun"), "-n2", "--overcommit", *python]
    if launcher == "openmpi":
        options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
        return [find("mpiexec.openmpi"), *options, *python]
    return [find("mpiexec.hydra"), "-n", "2", *python]


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "deepspeed", "openmpi", "mpich"])
def test_two_ranks_train_under(request, launcher, words, expected, tmp_path):
    variables = request.getfixturevalue("cluster") if launcher == "srun" else None
    script = [TRAIN, "--strategy", "ddp", *words, f"log.dir={tmp_path}", "log.name=r"]
    done = run(command(launcher, script), variables, timeout_s=120)
    assert done.status == 0, done.output
    assert done.output.count("Peak memory, ddp on cpu") == 1
    assert "strategy ddp: 2 ranks on cpu" in done.output
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-5)
    memory = json.loads((tmp_path / "r" / "memory.json").read_text())
    assert [rank["rank"] for rank in memory["ranks"]] == [0, 1]


def test_two_nodes_are_two_agents(words, expected, tmp_path):
    meeting = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    agent = [interpreter(), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    agent += ["--rdzv-backend=c10d", "--rdzv-id=two", "--local-addr=127.0.0.1", meeting]
    script = [TRAIN, *words, f"log.dir={tmp_path}", "log.name=r"]
    processes = [start([*agent, *script]) for _ in range(2)]
    ended: list[Finished] = [finish(process, 120) for process in processes]
    for done in ended:
        assert done.status == 0, done.output
    assert sum(done.output.count("Peak memory, ddp on cpu") for done in ended) == 1
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-5)


def test_plain_deepspeed_starts_one_rank_and_says_how_to_get_two(words, tmp_path):
    port = str(free_port())
    done = run(
        [
            interpreter("deepspeed"),
            find("deepspeed"),
            "--master_port",
            port,
            TRAIN,
            *words,
            f"log.dir={tmp_path}",
            "log.name=r",
        ],
        timeout_s=120,
    )
    assert done.status == 0, done.output
    assert "deepspeed --num_accelerators 2 bigtrain/train.py" in done.output
    assert "1 rank on cpu" in done.output


def test_a_crash_under_deepspeed_keeps_the_ranks_traceback(words, tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = nn.Embedding(256, 256)\n"
        "    def forward(self, tokens):\n"
        "        if os.environ.get('RANK') == '1':\n"
        "            raise RuntimeError('out of cheese')\n"
        "        return self.embedding(tokens)\n"
    )
    port = str(free_port())
    script = [TRAIN, words[0], *words[5:], "model.name=broken:Net", f"log.dir={tmp_path}"]
    launch = [
        interpreter("deepspeed"),
        find("deepspeed"),
        "--num_accelerators",
        "2",
        "--master_port",
        port,
    ]
    launch += ["--master_port", port]
    done = run([*launch, *script], {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, timeout_s=60)
    assert done.status == 1
    assert done.output.count("RuntimeError: out of cheese") == 1
    last = done.output.rindex("Traceback (most recent call last)")
    assert "out of cheese" in done.output[last:]
