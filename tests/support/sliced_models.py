"""Models for the tests of slices, with the slices of their parameters, and one training pass."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

from bigtrain.activations.recompute import checkpoint_block
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import slice_modules, slice_tensors
from bigtrain.slicing.slices import Slices, SliceSection

WORDS, WIDTH, HEADS = 53, 48, 6
HEAD = WIDTH // HEADS


def slice_group(context: Any, **options: Any) -> SliceGroup:
    """The slice group of this rank on the tp axis."""
    return SliceGroup(context.tp_rank, context.tp_size, context.group("tp"), **options)


def layer_slices(
    block: str, qkv: str, output: str, expand: str, contract: str, inner: int
) -> dict[str, Slices]:
    """Slices of a transformer layer: columns of `qkv` and `expand`, rows of the other two."""
    slices = {}
    for kind in ("weight", "bias"):
        slices[f"{block}.{qkv}{kind}"] = Slices(0, (SliceSection(WIDTH, HEAD),) * 3)
        slices[f"{block}.{expand}.{kind}"] = Slices.even(0, inner)
    slices[f"{block}.{output}.weight"] = Slices.even(1, WIDTH, HEAD)
    slices[f"{block}.{contract}.weight"] = Slices.even(1, inner)
    return slices


class Case:
    """A model with its slices, and its loss on a fixed input."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        slices: dict[str, Slices],
        blocks: Callable[[Any], list[nn.Module]],
        loss: Callable[[nn.Module], Tensor],
    ) -> None:
        self.make, self.slices, self.blocks, self.loss = make, slices, blocks, loss


def gpt_case(*, tied: bool, length: int = 8, dropout: float = 0.0, layers: int = 2) -> Case:
    """A GPT of WORDS words, with or without a head tied to its embedding."""
    sizes = {"num_layers": layers, "width": WIDTH, "num_heads": HEADS, "vocab_size": WORDS}
    config = GPTConfig(
        **sizes,
        sequence_length=length,
        tie_embeddings=tied,
        dropout=dropout,  # type: ignore[arg-type]
    )
    slices = {}
    for n in range(layers):
        names = ("attention.qkv.", "attention.output", "mlp.expand", "mlp.output")
        slices |= layer_slices(f"blocks.{n}", *names, 4 * WIDTH)
    for name in ("embedding.token.weight", "head.weight"):
        slices[name] = Slices.even(0, WORDS)

    def loss(model: nn.Module) -> Tensor:
        words, targets = torch.randint(WORDS, (3, length)), torch.randint(WORDS, (3, length))
        targets[0, :3] = -100
        logits = model(words).reshape(-1, WORDS)
        return F.cross_entropy(logits, targets.reshape(-1), reduction="sum", label_smoothing=0.1)

    return Case(lambda: GPT(config), slices, lambda model: list(model.blocks), loss)


def vit_case() -> Case:
    """A ViT: its class token is put before the sequence of 16 and removed again, 17 places."""
    slices = {}
    for n in range(2):
        names = ("self_attention.in_proj_", "self_attention.out_proj", "mlp.0", "mlp.3")
        slices |= layer_slices(f"encoder.layers.encoder_layer_{n}", *names, 96)

    def make() -> nn.Module:
        model = VisionTransformer(16, 4, 2, HEADS, WIDTH, 96, num_classes=10)
        nn.init.normal_(model.heads[0].weight, std=0.1)
        return model

    def loss(model: nn.Module) -> Tensor:
        images, labels = torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.randint(10, (3,))
        return F.cross_entropy(model(images), labels)

    return Case(make, slices, lambda model: list(model.encoder.layers), loss)


class Encoder(nn.Module):
    """Torch's encoder layers, with the batch or the sequence as first dim."""

    def __init__(self, *, batch_first: bool, norm_first: bool, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 96, dropout, batch_first=batch_first, norm_first=norm_first
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def encoder_case(*, batch_first: bool, norm_first: bool = False, dropout: float = 0.0) -> Case:
    """Two of torch's encoder layers."""
    slices = {}
    for n in range(2):
        names = ("self_attn.in_proj_", "self_attn.out_proj", "linear1", "linear2")
        slices |= layer_slices(f"layers.{n}", *names, 96)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(3, 8, WIDTH, dtype=torch.float64)
        return model(x if batch_first else x.transpose(0, 1)).square().mean()

    def make() -> nn.Module:
        return Encoder(batch_first=batch_first, norm_first=norm_first, dropout=dropout)

    return Case(make, slices, lambda model: list(model.layers), loss)


class _Recomputed:
    """The forward pass of a block under recomputation."""

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self._block, self._selective = block, selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compute = type(self._block).forward.__get__(self._block)
        return checkpoint_block(self._block, compute, *args, selective=self._selective, **kwargs)


def recompute(blocks: list[nn.Module], mode: str) -> None:
    """Recompute each block, in full or selectively."""
    for block in blocks if mode else ():
        block.__dict__["forward"] = _Recomputed(block, selective=mode == "selective")


def build_model(case: Case, group: SliceGroup | None, mode: str = "") -> nn.Module:
    """A model with the same values each time; sliced if there is a group."""
    torch.manual_seed(0)
    model = case.make().double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    if group is not None:
        slice_tensors(model, case.slices, group)
        slice_modules(model, case.slices, group)
    recompute(case.blocks(model), mode)
    return model


def run_pass(model: nn.Module, case: Case, seed: int = 1) -> Tensor:
    """The loss of one forward and backward pass."""
    torch.manual_seed(seed)
    loss = case.loss(model)
    loss.backward()
    return loss


def differences(case: Case, group: SliceGroup, mode: str = "") -> dict[str, float]:
    """Differences of this rank's loss and gradients from those of one process, by name."""
    whole, model = build_model(case, None), build_model(case, group, mode)
    differences_by_name = {"loss": run_pass(whole, case) - run_pass(model, case)}
    parameters = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        wanted = parameter.grad
        if name in case.slices:
            wanted = case.slices[name].local(wanted, group.rank, group.size)
        differences_by_name[name] = wanted - parameters[name].grad
    return {name: d.abs().max().item() for name, d in differences_by_name.items()}


def fingerprints(case: Case, group: SliceGroup, mode: str = "") -> dict[str, str]:
    """Hashes of the gradients that must be equal bit for bit on all ranks, by name."""
    model = build_model(case, group, mode)
    run_pass(model, case)
    return {
        name: hashlib.sha256(copy.copy(p.grad).numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
        if name not in case.slices
    }
