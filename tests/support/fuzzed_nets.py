"""Small models of many kinds in float64, each with a forward pass that returns a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support.sliced import Run
from torch import Tensor, nn

from bigtrain.models.gpt import GPT, GPTConfig

CLASSES, WORDS, WIDTH = 10, 37, 24
Made = tuple[nn.Module, Run]


def prepare_model(model: nn.Module) -> nn.Module:
    """The model in float64, without dropout and without weights that are zero."""
    model = model.double().train()
    for module in model.modules():
        for name in ("p", "dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    return model


def image_model(make: Callable[[], nn.Module], side: int = 32, rows: int = 3) -> Made:
    """A classifier of images, or a model that returns several tensors by name."""
    torch.manual_seed(0)
    model = prepare_model(make())
    images = torch.randn(rows, 3, side, side, dtype=torch.float64)

    def run(model: nn.Module) -> tuple[Any, Tensor]:
        output = model(images)
        outputs = output if isinstance(output, tuple | list) else (output,)
        if isinstance(output, dict):
            outputs = tuple(output.values())
        losses = [
            F.cross_entropy(logits, torch.arange(logits[:, 0].numel()).view_as(logits[:, 0]) % 4)
            for logits in outputs
        ]
        return output, torch.stack(losses).sum()

    return model, run


def vector_model(make: Callable[[], nn.Module], *more: tuple[int, ...], **options: Any) -> Made:
    """A model of sequences of vectors (batch, sequence, width); `more` are shapes of
    other inputs.
    """
    torch.manual_seed(0)
    model = prepare_model(make())
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((3, 5, WIDTH), *more)]

    def run(model: nn.Module) -> tuple[Any, Tensor]:
        output = model(*inputs, **options)
        outputs = output if isinstance(output, tuple) else (output,)
        total = sum(t.pow(2).mean() + t.sum() / 7 for t in outputs if isinstance(t, Tensor))
        return output, total

    return model, run


def token_model(**options: Any) -> Made:
    """A GPT on random tokens."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "width": WIDTH, "num_heads": 6, "vocab_size": WORDS}
    model = prepare_model(GPT(GPTConfig(**sizes, sequence_length=8, **options)))
    words = torch.randint(WORDS, (3, 8))

    def run(model: nn.Module) -> tuple[Any, Tensor]:
        logits = model(words)
        return logits, F.cross_entropy(logits.flatten(0, 1), words.flatten())

    return model, run


class Attended(nn.Module):
    """All variants of torch's attention module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 6, batch_first=True, **options)
        self.needs_weights = not options

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """(batch, sequence, width), and another sequence, to (batch, sequence, width)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -2:] = True
        y, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask)
        z, _ = self.attention(x, context, context, need_weights=False)
        from_numpy, _ = self.attention(x[0], context[0], context[0], average_attn_weights=False)
        return y * weights.sum(-1, keepdim=True) + z + from_numpy


class Encoded(nn.Module):
    """An encoder and a decoder of torch's transformer modules."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        sizes = {"nhead": 4, "dim_feedforward": 32, "batch_first": True, "norm_first": norm_first}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, **sizes), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, **sizes), 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same shape."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.decoder(x, self.encoder(x), tgt_mask=mask, tgt_is_causal=True)


class Recurrent(nn.Module):
    """Recurrent layers, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, 10, 2, batch_first=True, bidirectional=True)
        self.second = nn.GRU(20, 8, batch_first=True)
        self.last = nn.GRUCell(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to (batch, 6)."""
        x, _ = self.second(self.first(x)[0])
        state = x.new_zeros(x.shape[0], 6)
        for step in range(x.shape[1]):
            state = self.last(x[:, step], state)
        return state


class Upwards(nn.Module):
    """A downsampling and an upsampling path with a skip connection (U-Net)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.norm, self.slope = nn.GroupNorm(4, 8), nn.PReLU(8)
        self.down = nn.Conv2d(8, 16, 2, 2, groups=4)
        self.instance = nn.InstanceNorm2d(16, affine=True, track_running_stats=True)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2, groups=2)
        self.last = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, h, w) to (batch, 4, 2 h, 2 w)."""
        first = self.slope(self.norm(self.first(x)))
        second = F.gelu(self.instance(self.down(first)))
        return F.pixel_shuffle(self.last(torch.cat([first, self.up(second)], 1)), 2)


def _vit() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 8, 2, 6, 48, 96, num_classes=CLASSES)


def _swin(*, second: bool) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    depths, heads = [2, 1], [3, 6]
    return swin.SwinTransformer(
        [4, 4], 24, depths, heads, [4, 4], num_classes=CLASSES, **(parts if second else {})
    )


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt(
        [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], 0.3, num_classes=CLASSES
    )


def _resnet(**options: Any) -> nn.Module:
    from torchvision.models import resnet

    block = resnet.Bottleneck if options else resnet.BasicBlock
    return resnet.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, **options)


def _densenet() -> nn.Module:
    from torchvision.models.densenet import DenseNet

    return DenseNet(8, (2, 3), 16, num_classes=CLASSES)


def _regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    sizes = {"depth": 4, "w_0": 24, "w_a": 16, "w_m": 2.2, "group_width": 8, "se_ratio": 0.25}
    return RegNet(BlockParams.from_init_params(**sizes), num_classes=CLASSES)


def _maxvit() -> nn.Module:
    from torchvision.models.maxvit import MaxVit

    return MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.1, num_classes=CLASSES)


def _torchvision_model(name: str, **options: Any) -> nn.Module:
    """A model of torchvision by name, with few layers and channels."""
    from torchvision import models

    model: nn.Module = models.get_model(name, weights=None, **options)
    return model


SMALL: dict[str, Callable[[], nn.Module]] = {
    "swin": lambda: _swin(second=False),
    "convnext": _convnext,
    "bottlenecks": lambda: _resnet(width_per_group=16),
    "densenet": _densenet,
    "regnet": _regnet,
}
"""Torchvision's nets with few layers of few channels, for images of 32 x 32."""
NETS: dict[str, Callable[[], Made]] = {
    "gpt": lambda: token_model(tie_embeddings=False),
    "gpt, tied": lambda: token_model(bias=False),
    "attention": lambda: vector_model(Attended, (3, 5, WIDTH)),
    "attention, other widths": lambda: vector_model(
        lambda: Attended(add_bias_kv=True, add_zero_attn=True), (3, 5, WIDTH)
    ),
    "encoder": lambda: vector_model(lambda: Encoded(norm_first=False)),
    "encoder, norm first": lambda: vector_model(lambda: Encoded(norm_first=True)),
    "recurrent": lambda: vector_model(Recurrent),
    "upwards": lambda: image_model(Upwards, 8),
    "vit": lambda: image_model(_vit),
    "swin": lambda: image_model(lambda: _swin(second=False)),
    "swin, second": lambda: image_model(lambda: _swin(second=True)),
    "convnext": lambda: image_model(_convnext),
    "resnet": lambda: image_model(_resnet),
    "resnext": lambda: image_model(lambda: _resnet(groups=4, width_per_group=8)),
    "densenet": lambda: image_model(_densenet),
    "regnet": lambda: image_model(_regnet),
    "shufflenet": lambda: image_model(
        lambda: _torchvision_model("shufflenet_v2_x0_5", num_classes=CLASSES), 64
    ),
    "squeezenet": lambda: image_model(
        lambda: _torchvision_model("squeezenet1_1", num_classes=CLASSES)
    ),
    "mobilenet": lambda: image_model(
        lambda: _torchvision_model("mobilenet_v3_small", num_classes=CLASSES)
    ),
}
LARGE: dict[str, Callable[[], Made]] = {
    "maxvit": lambda: image_model(_maxvit, 64),
    "efficientnet": lambda: image_model(
        lambda: _torchvision_model("efficientnet_b0", num_classes=CLASSES), 64
    ),
    "googlenet": lambda: image_model(
        lambda: _torchvision_model("googlenet", num_classes=CLASSES, init_weights=False), 96
    ),
    "deeplab": lambda: image_model(
        lambda: _torchvision_model(
            "deeplabv3_mobilenet_v3_large", num_classes=5, weights_backbone=None
        ),
        64,
    ),
}
