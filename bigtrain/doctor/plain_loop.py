"""Train one model by a plain torch loop and by `bigtrain.prepare`; compare time, memory and waits.

`python -m bigtrain.doctor.plain_loop FILE` writes the figures of both loops as JSON. Both loops run
in one process, train the same GPT on the same batch with the same optimizer and precision, and
compute the loss from whole logits. Their steps alternate, so that other work on the machine slows
both.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bigtrain
from bigtrain.devices import (
    accelerator,
    allocator_peaks,
    count_waits,
    current_device,
    is_accelerator,
    reset_peaks,
    start_kernels,
    synchronize,
)
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.gpt import GPT, GPTConfig

TIMED_STEPS = 12
"""The timed steps of each loop."""
_SMALL = GPTConfig(num_layers=4, width=128, num_heads=4, vocab_size=512, sequence_length=128)
_LARGE = GPTConfig(num_layers=12, width=768, num_heads=12, vocab_size=50257, sequence_length=1024)
"""The model on a GPU: GPT-2's smallest, of 124 million parameters."""
_ROWS = 8

LoopStep = Callable[[], float]
"""One step of a loop: it returns the loss."""


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, computed in fp32.

    Without the conversion torch's autocast on a GPU would compute the logarithms in bf16, where
    bigtrain computes them in fp32.

    Args:
        logits: of shape (rows, tokens, vocabulary).
        targets: the tokens, of shape (rows, tokens).
    """
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def model_shape() -> GPTConfig:
    """Return the shape of the model of both loops."""
    return _SMALL if accelerator() is None else _LARGE


def plain_step(device: torch.device, batch: tuple[Tensor, Tensor], weights: Any) -> LoopStep:
    """Return the step of a loop that a user would write with torch alone.

    Args:
        device: the device of the run.
        batch: tokens and targets on the host, each of shape (rows, tokens).
        weights: the state_dict of the model before the first step.
    """
    module = GPT(model_shape()).to(device)
    module.load_state_dict(weights)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=is_accelerator(device))
    precision = partial(torch.autocast, device.type, torch.bfloat16, is_accelerator(device))

    def step() -> float:
        inputs, targets = (part.to(device, non_blocking=True) for part in batch)
        with precision():
            loss = token_loss(module(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def prepared_step(batch: tuple[Tensor, Tensor], weights: Any) -> LoopStep:
    """Return the step of the same loop with `bigtrain.prepare`; see `plain_step`."""

    def built() -> nn.Module:
        module = GPT(model_shape())
        module.load_state_dict(weights)
        return module

    engine = bigtrain.prepare(
        built,
        token_loss,
        partial(torch.optim.AdamW, lr=1e-3, fused=accelerator() is not None),
        strategy="single",
        train__global_batch_size=_ROWS,
        train__precision="fp32" if accelerator() is None else "bf16",
        optim__clip_norm=1.0,
        memory__track_steps=0,
        memory__predict=False,
    )
    return lambda: engine.step(batch).loss


def compare() -> dict[str, Any]:
    """Return the figures of both loops, as JSON values.

    Peaks are in bytes, and count what a loop adds to the bytes that are alive before it. They
    include the build and the first two steps. Seconds are medians of a step. Waits are those of the
    host for the device in one step; None on a CPU.
    """
    device = current_device(str(accelerator() or "cpu"))
    start_kernels(device)
    torch.manual_seed(0)
    shape = model_shape()
    weights = GPT(shape).state_dict()
    tokens = torch.randint(shape.vocab_size, (_ROWS, shape.sequence_length + 1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    builders = {
        "plain": partial(plain_step, device, batch, weights),
        "prepared": partial(prepared_step, batch, weights),
    }
    steps: dict[str, LoopStep] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, build in builders.items():
        steps[name], figures[name] = _built(build, device)
    for name, step in steps.items():
        with count_waits(device) as waits:
            step()
        figures[name]["waits"] = waits()
    for name, seconds in _alternated(steps, device).items():
        figures[name]["step_seconds"] = seconds
    return figures


def _built(build: Callable[[], LoopStep], device: torch.device) -> tuple[LoopStep, dict[str, Any]]:
    """Build a loop and run two steps; return the step, the peak in bytes, and the losses."""
    if is_accelerator(device):
        before = reset_peaks(device)
        step = build()
        losses = [step(), step()]
        peak = allocator_peaks(device).requested - before
    else:
        with StorageTracker() as tracker:
            step = build()
            losses = [step(), step()]
        peak = tracker.peak_bytes
        tracker.close()
    return step, {"peak_bytes": peak, "losses": losses}


def _alternated(steps: dict[str, LoopStep], device: torch.device) -> dict[str, float]:
    """Return the median seconds of a step of each loop; the steps alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TIMED_STEPS):
        for name, step in steps.items():
            synchronize(device)
            began = time.perf_counter()
            step()
            synchronize(device)
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compare()), "utf-8")
