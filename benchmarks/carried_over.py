"""Training scripts as people write them, carried over to `bigtrain.prepare`: lines and numbers.

    OMP_NUM_THREADS=1 python benchmarks/carried_over.py

Each script is a pair: a plain torch loop, and the same loop with an engine. The subjects are those
of the public examples of Accelerate and Lightning (image classification, gradient accumulation with
clipping, language modelling, a GAN, a moving average, an autoencoder); the code is our own, and the
data are drawn. The lines that differ are counted, and the losses of every step compared with the
plain loop's on the same global batches, on two ranks. Results: results/carried_over.json.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "results" / "carried_over.json"
LIMIT_S = 120.0
HEAD = """
import functools, json, os, sys
import torch
import torch.nn.functional as F
from torch import nn

def draw(step, *shapes):
    made = torch.Generator().manual_seed(step)
    return [torch.randn(8, *shape, generator=made) for shape in shapes]

def classes(step, number):
    return torch.randint(0, number, (8,), generator=torch.Generator().manual_seed(100 + step))

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
def mine(tensor):
    return tensor.chunk(WORLD)[RANK]

losses = []
torch.manual_seed(0)
"""
TAIL = """
if RANK == 0:
    open(os.environ["LOSSES"], "w").write(json.dumps(losses))
"""
IMAGES = """
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
def batch(step):
    return draw(step, (3, 8, 8))[0], classes(step, 5)
"""
PLAIN_STEP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(4):
    inputs, targets = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
ENGINE_STEP = """
import bigtrain
optimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
engine = bigtrain.prepare(model, F.cross_entropy, optimizer, strategy=sys.argv[1], device="cpu")
for step in range(4):
    inputs, targets = batch(step)
    losses.append(engine.step((mine(inputs), mine(targets))).loss)
engine.close()
"""
LANGUAGE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        layer = functools.partial(nn.TransformerEncoderLayer, 16, 2, 32, 0.0, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(16, 17)
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
model = Model()
def next_token(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
def batch(step):
    tokens = torch.randint(0, 17, (8, 6), generator=torch.Generator().manual_seed(step))
    return tokens, tokens
"""
AUTOENCODER = """
model = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 12))
def batch(step):
    inputs, = draw(step, (12,))
    return inputs, inputs
"""
GAN = """
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
judged = F.binary_cross_entropy_with_logits
adam = functools.partial(torch.optim.Adam, lr=1e-2)
def truth(real):
    return torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
"""
PLAIN_GAN = """
of_generator, of_critic = adam(generator.parameters()), adam(critic.parameters())
for step in range(4):
    real, one, other = draw(step, (2,), (4,), (4,))
    made = generator(one).detach()
    of_critic.zero_grad()
    first = judged(critic(torch.cat([real, made])), truth(real))
    first.backward()
    of_critic.step()
    of_generator.zero_grad()
    second = judged(critic(generator(other)), torch.ones(len(real), 1))
    second.backward()
    of_generator.step()
    losses += [first.item(), second.item()]
"""
ENGINE_GAN = """
import bigtrain
keys = {"strategy": sys.argv[1], "device": "cpu"}
of_critic = bigtrain.prepare(critic, judged, adam, **keys)
judge = bigtrain.frozen(of_critic)
fooled = lambda made, real: judged(judge(made), real)
of_generator = bigtrain.prepare(generator, fooled, adam, beside=of_critic, **keys)
for step in range(4):
    real, one, other = map(mine, draw(step, (2,), (4,), (4,)))
    made = of_generator.model(one).detach()
    first = of_critic.step((torch.cat([real, made]), truth(real)))
    second = of_generator.step((other, torch.ones(len(real), 1)))
    losses += [first.loss, second.loss]
of_generator.close()
of_critic.close()
"""
PLAIN_AVERAGE = """
import copy
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(4):
    inputs, targets = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for own, new in zip(average.parameters(), model.parameters()):
            own.lerp_(new, 0.1)
    losses.append(loss.item())
with torch.no_grad():
    losses.append(average(batch(9)[0]).square().mean().item())
"""
ENGINE_AVERAGE = """
import bigtrain
optimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
engine = bigtrain.prepare(model, F.cross_entropy, optimizer, strategy=sys.argv[1], device="cpu")
average = bigtrain.ema(engine, 0.9)
for step in range(4):
    inputs, targets = batch(step)
    losses.append(engine.step((mine(inputs), mine(targets))).loss)
with average.swapped(), torch.no_grad():
    losses.append(engine.model(batch(9)[0]).square().mean().item())
engine.close()
"""


def with_loss(code: str, loss: str) -> str:
    """The same loop with another loss."""
    return code.replace("F.cross_entropy", loss)


def accumulated(code: str) -> str:
    """The plain loop in two micro-batches a step, with clipping."""
    old = "    loss = F.cross_entropy(model(inputs), targets)\n    loss.backward()\n"
    new = (
        "    for part, own in zip(inputs.chunk(2), targets.chunk(2)):\n"
        "        loss = F.cross_entropy(model(part), own) / 2\n"
        "        loss.backward()\n"
        "    loss = F.cross_entropy(model(inputs), targets)\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
    )
    return code.replace(old, new)


ACCUMULATED_ENGINE = ENGINE_STEP.replace(
    'device="cpu")', 'device="cpu", train__accumulation_steps=2, optim__clip_norm=0.5)'
)
PAIRS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "image classification": (IMAGES, PLAIN_STEP, ENGINE_STEP, ("ddp", "fsdp", "zero2")),
    "accumulation and clipping": (
        IMAGES,
        accumulated(PLAIN_STEP),
        ACCUMULATED_ENGINE,
        ("ddp", "fsdp"),
    ),
    "language modelling": (
        LANGUAGE,
        with_loss(PLAIN_STEP, "next_token"),
        with_loss(ENGINE_STEP, "next_token"),
        ("ddp", "fsdp"),
    ),
    "autoencoder": (
        AUTOENCODER,
        with_loss(PLAIN_STEP, "F.mse_loss"),
        with_loss(ENGINE_STEP, "F.mse_loss"),
        ("ddp", "zero1_torch"),
    ),
    "GAN": (GAN, PLAIN_GAN, ENGINE_GAN, ("ddp", "zero1_torch")),
    "moving average": (IMAGES, PLAIN_AVERAGE, ENGINE_AVERAGE, ("ddp", "fsdp")),
}


def losses_of(source: str, strategy: str | None, folder: Path) -> list[float] | str:
    """What a script writes down, run alone or on two ranks; or the end of what it says."""
    script, found = folder / "script.py", folder / "losses.json"
    script.write_text(source, "utf-8")
    found.unlink(missing_ok=True)
    command = [sys.executable, str(script)]
    if strategy is not None:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launch, str(script), strategy]
    environment = {**os.environ, "LOSSES": str(found), "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"longer than {LIMIT_S:.0f} s"
    if not found.exists():
        said = [line for line in ran.stderr.splitlines() if "Error" in line]
        return (said or ran.stderr.splitlines() or [""])[0][:300]
    values: list[float] = json.loads(found.read_text("utf-8"))
    return values


def changed_lines(plain: str, engine: str) -> dict[str, int]:
    """Lines that are gone, and lines that have come."""
    lines = list(difflib.ndiff(plain.strip().splitlines(), engine.strip().splitlines()))
    counted = {"gone": "- ", "come": "+ "}
    return {
        "plain": len(plain.strip().splitlines()),
        "engine": len(engine.strip().splitlines()),
        **{key: sum(line.startswith(mark) for line in lines) for key, mark in counted.items()},
    }


def main() -> None:
    """Run all pairs, or those named on the command line, and write the file."""
    rows: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    chosen = sys.argv[1:] or list(PAIRS)
    with tempfile.TemporaryDirectory() as name:
        for title in chosen:
            setup, plain, engine, strategies = PAIRS[title]
            expected = losses_of(HEAD + setup + plain + TAIL, None, Path(name))
            row: dict[str, Any] = {"lines": changed_lines(plain, engine), "strategies": {}}
            for strategy in strategies:
                found = losses_of(HEAD + setup + engine + TAIL, strategy, Path(name))
                outcome: Any = found
                if isinstance(found, list) and isinstance(expected, list):
                    gaps = [
                        abs(a - b) / max(abs(b), 1e-12)
                        for a, b in zip(found, expected, strict=True)
                    ]
                    outcome = {"largest_relative_difference": max(gaps), "numbers": len(found)}
                row["strategies"][strategy] = outcome
            rows[title] = row
            print(title, json.dumps(row))
            FILE.write_text(f"{json.dumps(rows, indent=1)}\n", "utf-8")


if __name__ == "__main__":
    main()
