"""Blocks that cannot be recomputed, and the messages that refuse them."""

from __future__ import annotations

import copy
import pickle
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.recomputed_blocks import Blocks, ChangesItsInput, Inner, resolved_plan_for, rows
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, set_checkpoint_early_stop

from bigtrain.activations.offload import ActivationOffloader
from bigtrain.activations.policy import apply_policies, remove_policies
from bigtrain.activations.recompute import _SelectivePolicy, checkpoint_block
from bigtrain.errors import ConfigError


def test_a_block_that_changes_its_input_is_kept_under_a_budget():
    assert (
        "3 save all activations;"
        in resolved_plan_for(partial(Blocks, ChangesItsInput), 10**9).notes[0]
    )


def test_a_scripted_block_is_refused():
    with pytest.warns(FutureWarning, match="deprecated"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="compiled by torch.jit.script"):
        apply_policies(nn.Sequential(scripted), {"0": "full"})


def test_a_copy_of_a_shaped_model_does_the_same_and_a_closed_one_is_as_it_was(tmp_path):
    model = Blocks(Inner)
    plain = model.layers[0].forward.__func__
    mover = ActivationOffloader("disk", torch.device("cpu"), str(tmp_path))
    apply_policies(
        model, {"layers.0": "full_offload", "layers.1": "full", "layers.2": "offload"}, mover
    )
    twin = copy.deepcopy(model)
    assert isinstance(pickle.loads(pickle.dumps(model)), Blocks)
    for net in (model, twin):
        torch.manual_seed(3)
        net(rows()[0]).sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    remove_policies(model)
    assert all("forward" not in layer.__dict__ for layer in model.layers)
    assert model.layers[0].forward.__func__ is plain
    mover.close()


def test_what_selective_keeps_is_known_by_the_result_whatever_torch_tells_the_policy() -> None:
    """torch 2.11 asks the policy before there is a result."""
    policy = _SelectivePolicy()
    mm, relu = torch.ops.aten.mm.default, torch.ops.aten.relu.default
    saved, not_saved = torch.ones(2, 2), torch.ones(2, 2)
    policy_context = SimpleNamespace(is_recompute=False)
    assert policy(policy_context, mm, saved, saved) is CheckpointPolicy.MUST_SAVE
    assert policy(policy_context, relu, saved) is CheckpointPolicy.PREFER_RECOMPUTE
    policy.note(mm, (saved, saved), {}, saved)
    policy.note(relu, (saved,), {}, not_saved)
    assert policy.keeps(saved.untyped_storage()._cdata)
    assert not policy.keeps(not_saved.untyped_storage()._cdata)
    with pytest.raises(ConfigError, match="changes one in place"):
        policy(policy_context, torch.ops.aten.relu_.default, saved)


class Pair(nn.Module):
    """A block of two linear layers; `between` is between them, and `after` at the end."""

    def __init__(self, between=torch.tanh, after=torch.neg, *, nested: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between, self.after, self.nested = between, after, nested

    def forward(self, x):
        def inner(x):
            return self.last(self.between(self.first(x)))

        return self.after(checkpoint(inner, x, use_reentrant=False) if self.nested else inner(x))


def saved_products(block: Pair, x: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
    """Run a block selectively; return its output, and whether the results of both layers live."""
    results: list[weakref.ref[torch.UntypedStorage]] = []
    handles = [
        layer.register_forward_hook(
            lambda _m, _args, made: results.append(weakref.ref(made.untyped_storage()))
        )
        for layer in (block.first, block.last)
    ]
    output = checkpoint_block(block, block.forward, x, selective=True)
    for handle in handles:
        handle.remove()
    return output, [result() is not None for result in results]


def in_a_list(x: torch.Tensor) -> torch.Tensor:
    """The same numbers; the tensor is saved by hooks of the model's own code."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda kept: kept[0]):
        return torch.sigmoid(x)


@pytest.mark.parametrize(
    ("block", "around", "saves_last"),
    [
        pytest.param(Pair(), nullcontext, False, id="nothing after it is saved"),
        pytest.param(Pair(after=torch.sigmoid), nullcontext, True, id="a later result is saved"),
        pytest.param(Pair(after=torch.sin), nullcontext, True, id="a later input is saved"),
        pytest.param(Pair(), lambda: set_checkpoint_early_stop(False), True, id="no early stop"),
        pytest.param(Pair(after=torch.sin, nested=True), nullcontext, True, id="checkpoint in it"),
        pytest.param(Pair(nested=True), nullcontext, True, id="checkpoint at its end"),
        pytest.param(Pair(between=in_a_list), nullcontext, False, id="hooks in it"),
        pytest.param(Pair(after=in_a_list), nullcontext, False, id="hooks after it"),
    ],
)
def test_selective_frees_a_product_that_the_recomputation_does_not_read(
    block: Pair, around: type[AbstractContextManager[None]], saves_last: bool
) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    wanted = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    with around():
        output, (first_lives, last_lives) = saved_products(block, x)
        assert first_lives
        assert last_lives == saves_last
        grads = torch.autograd.grad(output.square().sum(), [x, *block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
