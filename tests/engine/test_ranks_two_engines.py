"""Two engines in one process: the two networks of a GAN, trained alternately as in a plain loop."""

from __future__ import annotations

import functools
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import Tensor, nn

import bigtrain
from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.prepare import connect_beside
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.launcher_env import RankInfo

ROWS, STEPS = 8, 4
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return generator, nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


def draws(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Real points, and noise for the step of each network."""
    draw = torch.Generator().manual_seed(step)
    sizes = (2, 4, 4)
    real, critic_noise, generator_noise = (
        torch.randn(ROWS, size, generator=draw) for size in sizes
    )
    return real + 1, critic_noise, generator_noise


def critic_loss(output: Tensor, real: Tensor) -> Tensor:
    """The critic's loss for points of which `real` says whether they are real."""
    return F.binary_cross_entropy_with_logits(output, real)


def plain_loop() -> list[tuple[float, float]]:
    generator, critic = networks()
    of_generator, of_critic = ADAM(generator.parameters()), ADAM(critic.parameters())
    losses = []
    for step in range(STEPS):
        real, critic_noise, generator_noise = draws(step)
        points = torch.cat([real, generator(critic_noise).detach()])
        truth = torch.cat([torch.ones(ROWS, 1), torch.zeros(ROWS, 1)])
        of_critic.zero_grad()
        first = critic_loss(critic(points), truth)
        first.backward()
        of_critic.step()
        of_generator.zero_grad()
        second = critic_loss(critic(generator(generator_noise)), torch.ones(ROWS, 1))
        second.backward()
        of_generator.step()
        losses.append((float(first.detach()), float(second.detach())))
    return losses


def train_alternately(context: Any, of_critic: str, of_generator: str) -> Any:
    """The losses of both networks, or the message of the refusal."""
    generator, critic = networks()
    rank_rows = slice(context.dp_rank * ROWS // context.dp_size, None)
    rank_rows = slice(rank_rows.start, rank_rows.start + ROWS // context.dp_size)
    keys = {"device": "cpu", "memory.track_steps": 0}
    job = job_from_keys(of_critic, keys)
    other_job = job_from_keys(of_generator, keys)
    with Engine(critic, critic_loss, ADAM, job, context) as critic_engine:
        try:
            judge = bigtrain.frozen(critic_engine)
        except ConfigError as error:
            return str(error)

        def fooled(output: Tensor, real: Tensor) -> Tensor:
            return critic_loss(judge(output), real)

        losses = []
        with Engine(generator, fooled, ADAM, other_job, context) as engine:
            for step in range(STEPS):
                real, critic_noise, generator_noise = (tensor[rank_rows] for tensor in draws(step))
                with torch.no_grad():
                    made = engine.model(critic_noise)
                rows = len(real)
                truth = torch.cat([torch.ones(rows, 1), torch.zeros(rows, 1)])
                first = critic_engine.step((torch.cat([real, made]), truth)).loss
                losses.append((first, engine.step((generator_noise, torch.ones(rows, 1))).loss))
        assert all(p.grad is None or not p.grad.any() for p in critic_engine.model.parameters())
    return losses


@pytest.mark.parametrize(
    ("of_critic", "of_generator"),
    [
        ("ddp", "ddp"),
        ("zero1_torch", "zero1_torch"),
        ("ddp", "fsdp"),
        ("zero2", "zero2"),
        ("zero1_torch+offload_disk", "ddp+full"),
    ],
)
def test_two_networks_train_in_turn_as_in_a_plain_loop(of_critic, of_generator):
    for losses in run_ranks(train_alternately, 2, of_critic, of_generator):
        for figures, expected in zip(losses, plain_loop(), strict=True):
            assert figures == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("fsdp", "a rank has a part of the model"),
        ("zero3", "a rank has a part of the model"),
        ("ddp+full", "blocks are recomputed in the backward pass"),
    ],
)
def test_what_cannot_be_inside_another_loss_is_refused(strategy, why):
    for message in run_ranks(train_alternately, 2, strategy, "ddp"):
        assert f"frozen: under strategy {strategy} {why}" in message
        assert "Use strategy ddp, zero1_torch or zero2 for this engine" in message


def prepared_twice(context: Any) -> list[str]:
    """The messages for a second engine without `beside`, and for one with a different mesh."""
    del context
    messages = []
    placement = RankInfo(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="python")
    job = job_from_keys("ddp", {"device": "cpu"})
    plan = make_plan(job, 2, "cpu")
    try:
        connect_beside(None, job, plan, placement, {})
    except ConfigError as error:
        messages.append(str(error))
    return messages


def test_a_second_engine_is_told_to_name_the_first():
    for messages in run_ranks(prepared_twice, 2):
        assert messages == [
            "prepare: the ranks are connected already, by another engine or by the script. Give "
            "prepare(..., beside=engine) for a second engine, or close the first."
        ]


def other_mesh(context: Any) -> tuple[str, float]:
    _, critic = networks()
    with Engine(
        critic, critic_loss, ADAM, job_from_keys("ddp", {"device": "cpu"}), context
    ) as engine:
        placement = RankInfo(
            rank=context.rank, local_rank=context.rank, world_size=2, local_world_size=2,
            launcher="python",
        )  # fmt: skip
        job = job_from_keys("tensor", {"device": "cpu"})
        message = ""
        try:
            connect_beside(engine, job, make_plan(job, 2, "cpu"), placement, {})
        except ConfigError as error:
            message = str(error)
        job = job_from_keys("ddp", {"device": "cpu", "train.seed": 7})
        with connect_beside(engine, job, make_plan(job, 2, "cpu"), placement, {}) as second_engine:
            assert second_engine.mesh is context.mesh
            return message, second_engine.seed


def test_engines_of_one_process_have_one_mesh_and_each_its_seed():
    for message, seed in run_ranks(other_mesh, 2):
        assert "the engine's ranks are pp 1 x dp 2 x tp 1 on cpu, and this one's" in message
        assert seed == 7


def test_prepare_puts_a_second_engine_beside_a_first():
    generator, critic = networks()
    keys: dict[str, Any] = {"strategy": "single", "device": "cpu"}
    with (
        closing(bigtrain.prepare(critic, critic_loss, ADAM, **keys)) as critic_engine,
        closing(
            bigtrain.prepare(generator, critic_loss, ADAM, beside=critic_engine, **keys)
        ) as generator_engine,
    ):
        assert generator_engine.context.world_size == critic_engine.context.world_size == 1
        assert bigtrain.frozen(critic_engine)(torch.zeros(3, 2)).shape == (3, 1)
