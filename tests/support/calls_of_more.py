"""Calls of functions of several tensors: for each name, the shapes of the tensors and the
function.
"""

import torch
import torch.nn.functional as F

X = (4, 6, 8)
IMAGE = (4, 6, 5, 5)
WORDS = torch.tensor([[3, 0, 10, 3, 5], [1, 2, 9, 7, 7]])
TARGETS = torch.tensor([4, 10, 2, 2, 0])
PLACES = torch.arange(4 * 3 * 8).view(4, 3, 8) % 6
THREE = torch.tensor([0, 5, 2])


def set_to(index):
    """A function that assigns `value` to the elements of x at an index."""

    def function(x, value):
        y = x * 1
        y[index] = value
        return y

    return function


def into_plain(value):
    """Assign a value into a plain tensor of zeros, which becomes sliced."""
    y = torch.zeros(4, 2, 8, dtype=value.dtype)
    y[:, 0] = value
    return y


def changed(x, y):
    """Change a result in place by adding, multiplying and so on."""
    z = x * 1
    z += y
    z *= 2
    z.sub_(y)
    return z


def batch_norm(training):
    """A function of (x, mean, spread, weight, bias) that normalizes over the batch."""

    def function(x, mean, spread, weight, bias):
        mean, spread = mean.detach().clone(), spread.detach().abs() + 0.5
        return F.batch_norm(x, mean, spread, weight, bias, training), mean, spread

    return function


def instance_norm(x, mean, spread, weight):
    """Normalize each sample and channel, with running statistics."""
    mean, spread = mean.detach().clone(), spread.detach().abs() + 0.5
    return F.instance_norm(x, mean, spread, weight, None, True), mean, spread


ELEMENTS = {
    "add": ((X, X), lambda x, y: x + y),
    "broadcast row": ((X, (8,)), lambda x, y: x + y),
    "broadcast columns": ((X, (6, 1)), lambda x, y: y * x),
    "broadcast both": (((4, 1, 8), (6, 1)), lambda x, y: x - y),
    "three": ((X, X, (6, 8)), lambda x, y, z: torch.addcmul(x, y, z, value=2)),
    "choice": ((X, X, (6, 1)), lambda x, y, z: torch.where(x > 0, y, z).clamp(min=z)),
    "changed": ((X, (6, 8)), changed),
    "masked": ((X, (6, 8)), lambda x, y: x.masked_fill(y > 0, -3.0)),
    "channels": (((4, 6, 5), (6,)), lambda x, w: F.prelu(x, w)),
    "losses": ((X, X), lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y, reduction="sum")),
    "loss of truths": ((X, X), lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid())),
    "weight norm": (((4, 6), (4, 1)), lambda v, g: torch._weight_norm(v, g, 0)),
}
PIECES = {
    "cat": ((X, (4, 5, 8)), lambda x, y: torch.cat([x, y], 1)),
    "cat short": ((X, (4, 1, 8)), lambda x, y: torch.cat([y, x], 1)),
    "stack": (((6, 8), (6, 8)), lambda x, y: torch.stack([x, y])),
    "set row": ((X, (4, 8)), set_to((slice(None), 1))),
    "set range": ((X, (6, 3)), set_to((..., slice(2, 5)))),
    "set rows": ((X, (3, 8)), set_to((slice(None), THREE))),
    "set corner": ((X, (1,)), set_to((slice(1, 3), slice(2, 4)))),
    "set plain": (((4, 8),), into_plain),
    "scatter": ((X, (4, 3, 8)), lambda x, y: x.scatter(1, PLACES, y) + x.scatter_add(1, PLACES, y)),
    "scatter in place": ((X, (4, 3, 8)), lambda x, y: (x * 1).scatter_add_(1, PLACES, y)),
    "index add": ((X, (4, 3, 8)), lambda x, y: x.index_add(1, THREE, y, alpha=2)),
    "index copy": ((X, (4, 3, 8)), lambda x, y: (x * 1).index_copy_(1, THREE, y)),
    "masked scatter": ((X, (200,)), lambda x, y: x.masked_scatter(x > 0, y)),
    "table": (((9, 4),), lambda t: t[WORDS % 9].permute(2, 0, 1)),
}
PRODUCTS = {
    "linear": (((4, 3, 6), (8, 6), (8,)), lambda x, w, b: F.linear(x, w, b)),
    "linear by name": (((6,), (8, 6), (8,)), lambda x, w, b: F.linear(input=x, weight=w, bias=b)),
    "matmul": (((3, 4, 6), (3, 6, 8)), lambda a, b: a @ b + torch.bmm(a, b)),
    "matmul broadcast": (((3, 1, 4, 6), (2, 6, 8)), torch.matmul),
    "matmul vector": (
        ((3, 4, 6), (6,)),
        lambda a, b: (a @ b, b @ a.mT, a[0] @ b, torch.mv(a[0], b)),
    ),
    "vectors": (((6,), (6,)), lambda a, b: (a @ b, torch.dot(a, b), torch.outer(a, b))),
    "addmm": (((8,), (4, 6), (6, 8)), lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3)),
    "addmm of nothing": (((8,), (4, 6), (6, 8)), lambda c, a, b: torch.addmm(c, a, b, beta=0)),
    "baddbmm": (((3, 4, 8), (3, 4, 6), (3, 6, 8)), lambda c, a, b: torch.baddbmm(c, a, b, beta=0)),
    "einsum": (((2, 3, 4, 6), (2, 3, 5, 6)), lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b)),
    "einsum dots": (
        ((2, 3, 4, 6), (3, 6, 5)),
        lambda a, b: torch.einsum("...id,...dj->...ij", a, b),
    ),
    "einsum implied": (((4, 6), (6, 3)), lambda a, b: torch.einsum("ij,jk", a, b)),
    "einsum of one": (((1, 6), (4, 6)), lambda a, b: torch.einsum("ab,ab->b", a, b)),
    "einsum of three": (((4, 6), (6, 5), (5, 3)), lambda *t: torch.einsum("ab,bc,cd->ad", *t)),
    "einsum diagonal": (((4, 4, 6),), lambda a: torch.einsum("aab->b", a)),
    "bilinear": (((4, 3), (4, 6), (5, 3, 6), (5,)), F.bilinear),
    "inner": (((4, 6), (3, 6)), lambda a, b: torch.inner(a, b) + torch.cdist(a, b)),
    "embedding": (((11, 6),), lambda w: F.embedding(WORDS, w)),
    "embedding padded": (((11, 6),), lambda w: F.embedding(WORDS, w, padding_idx=-1)),
    "embedding bag": (((11, 6),), lambda w: F.embedding_bag(WORDS, w)),
    "attention": (((2, 6, 4, 8), (2, 6, 5, 8), (2, 6, 5, 8)), F.scaled_dot_product_attention),
    "attention masked": (
        ((2, 6, 4, 8), (2, 6, 5, 8), (2, 6, 5, 8), (6, 4, 5)),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
    ),
    "attention shared": (
        ((2, 6, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    ),
    "attention of one": (
        ((2, 6, 4, 8), (2, 1, 5, 8), (2, 1, 5, 8)),
        F.scaled_dot_product_attention,
    ),
    "cross entropy": (((5, 11),), lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1)),
}
CONVOLUTIONS = {
    "plain": ((IMAGE, (8, 6, 3, 3), (8,)), lambda x, w, b: F.conv2d(x, w, b, padding=1)),
    "one dim": (((4, 6, 9), (8, 6, 3), (8,)), lambda x, w, b: F.conv1d(x, w, b, dilation=2)),
    "unbatched": (((6, 5, 5), (8, 6, 3, 3), (8,)), lambda x, w, b: F.conv2d(x, w, b)),
    "depthwise": ((IMAGE, (6, 1, 3, 3), (6,)), lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 6)),
    "depthwise, wider": ((IMAGE, (12, 1, 3, 3)), lambda x, w: F.conv2d(x, w, groups=6)),
    "grouped": (((4, 12, 5, 5), (8, 3, 3, 3), (8,)), lambda x, w, b: F.conv2d(x, w, b, groups=4)),
    "transposed": ((IMAGE, (6, 8, 3, 3), (8,)), lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1)),
    "transposed, grouped": (
        (IMAGE, (6, 4, 3, 3), (8,)),
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, groups=2),
    ),
}
NORMS = {
    "layer": ((X, (8,), (8,)), lambda x, w, b: F.layer_norm(x, (8,), w, b)),
    "layer by name": ((X, (8,)), lambda x, b: F.layer_norm(x, normalized_shape=(8,), bias=b)),
    "layer of two": ((X, (6, 8)), lambda x, w: F.layer_norm(x, (6, 8), w)),
    "root mean square": ((X, (8,)), lambda x, w: F.rms_norm(x, (8,), w, eps=1e-5)),
    "batch": (((4, 6, 5), (6,), (6,), (6,), (6,)), batch_norm(True)),
    "batch, evaluated": (((4, 6, 5), (6,), (6,), (6,), (6,)), batch_norm(False)),
    "instance": (((4, 6, 5), (6,), (6,), (6,)), instance_norm),
    "group": (((4, 12, 5), (12,), (12,)), lambda x, w, b: F.group_norm(x, 6, w, b)),
}
