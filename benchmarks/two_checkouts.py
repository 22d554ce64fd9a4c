"""Compare the step time of a training script under two checkouts of bigtrain, in alternation.

    python benchmarks/two_checkouts.py OLD NEW [--rounds 5] [--output FILE]

OLD and NEW are folders with a checkout and its `.venv`. Each run trains a GPT of 3.2 million
parameters with a user's loss on two ranks, under ddp and fsdp, and returns the median of its steps.
The checkouts alternate, and the order of a pair changes from round to round; the figure is the
median of the rounds' (NEW / OLD). `twice` is a loss with two means, which only NEW may support.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness

STRATEGIES = ("ddp", "fsdp")
STEPS, WARM_UP = 40, 5
MODEL = {"num_layers": 4, "width": 256, "num_heads": 4, "vocab_size": 97, "sequence_length": 128}


def train(strategy: str, means: int) -> None:
    """Run one rank; rank 0 prints the seconds of its steps."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    import bigtrain
    from bigtrain.models import make_model

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = F.cross_entropy(output.flatten(0, 1), target.flatten())
        return value + 0.01 * output.square().mean() if means == 2 else value

    rank = int(os.environ["RANK"])
    draw = torch.Generator().manual_seed(rank)
    batch = torch.randint(0, 97, (8, 128), generator=draw)
    seconds = []
    with bigtrain.prepare(
        lambda: make_model("gpt", MODEL),
        loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        strategy=strategy,
        example=(batch[:4], batch[:4]),
        train__global_batch_size=16,
        train__micro_batch_size=4,
        memory__predict=False,
        memory__track_steps=0,
        device="cpu",
    ) as engine:
        for _ in range(STEPS):
            began = time.perf_counter()
            engine.step((batch, batch))
            seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps(seconds[WARM_UP:]))


def median_step(checkout: Path, strategy: str, means: int) -> float:
    """Return the median seconds of a step under a checkout."""
    command = [str(checkout / ".venv/bin/torchrun"), "--nproc-per-node", "2", __file__]
    done = subprocess.run(
        [*command, "--train", strategy, "--means", str(means)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return statistics.median(seconds)


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train")
    parser.add_argument("--means", type=int, default=1)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.means)
        return
    if len(options.checkouts) != 2:
        parser.error(f"{len(options.checkouts)} checkouts, and 2 are needed: OLD NEW")
    old, new = (folder.resolve() for folder in options.checkouts)
    rows: dict[str, Any] = {}
    for strategy in STRATEGIES:
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        for number in range(options.rounds):
            checkouts = [("old", old), ("new", new)]
            for name, checkout in checkouts if number % 2 == 0 else reversed(checkouts):
                seconds[name].append(median_step(checkout, strategy, 1))
        ratios = [b / a for a, b in zip(seconds["old"], seconds["new"], strict=True)]
        twice = [median_step(new, strategy, 2) for _ in range(options.rounds)]
        rows[strategy] = {**seconds, "ratio": statistics.median(ratios), "twice": twice}
        print(f"{strategy}: {rows[strategy]['ratio']:.4f}", file=sys.stderr, flush=True)
    document = {"old_commit": commit_of(old), "new_commit": commit_of(new), "strategies": rows}
    harness.keep(options.output, document)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
