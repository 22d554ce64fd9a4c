"""Calls of functions of one tensor, of shape (4, 6, 8), or (4, 6, 8, 8) for images."""

import copy

import torch
import torch.nn.functional as F

PICKED = torch.tensor([3, 0, 5, 5, 1])
ROWS, COLUMNS = torch.tensor([1, 0, 3]), torch.tensor([7, 2, 2])
MASK = torch.tensor([True, False, True, True, False, True])
PLACES = torch.arange(4 * 3 * 8).view(4, 3, 8) % 6
GRID = torch.linspace(-0.9, 0.9, 4 * 5 * 5 * 2, dtype=torch.float64).view(4, 5, 5, 2)


def views_follow(x):
    """Change the base through views; views see the changes."""
    y = x * 1
    y[1:3, 2:4, 1].fill_(2.0)
    y.diagonal(0, 0, 1).mul_(3.0)
    y.view(-1)[3:40].zero_()
    twice = y * 2
    y[:, :, 3:5] += 1
    y[:, 0].add_(1)
    column = y.transpose(0, 1)
    column.mul_(1.5)
    return y, twice, column


def base_changes_views(x):
    """Change the base in place; an older view must see the change."""
    y = x * 1
    view = y.diagonal(0, 1, 2)
    y.mul_(2)
    return view + y.diagonal(0, 1, 2)


def hooked(x):
    """A gradient hook on an intermediate result."""
    y = x * 1
    y.register_hook(lambda gradient: gradient * 3)
    return y * 2


def added_out(x):
    """Add with `out=`."""
    out = torch.empty_like(x.detach())
    torch.add(x.detach(), 1, out=out)
    return out


def drawn(x):
    """Random numbers of several functions."""
    noise = torch.empty_like(x).bernoulli_(0.5)
    return x * noise * torch.rand_like(x) + torch.randn_like(x).normal_()


ELEMENTS = {
    "arithmetic": lambda x: (
        (1 - x) * 2 + x / 3 - 2**x + (-x).abs().detach() // 1 + x % 2 + (x > 0).double()
    ),
    "functions": lambda x: (x.abs() + 1).log().sqrt().tanh() + torch.exp(-(x**2)) + torch.erf(x),
    "activations": lambda x: F.gelu(x) + F.silu(x) + F.leaky_relu(x, 0.1) + F.softplus(x),
    "changed": lambda x: F.relu((x * 1).add_(1).mul_(2), inplace=True),
    "changed by place": lambda x: F.hardtanh(x * 1, -1.0, 1.0, True),
    "types": lambda x: x.float().to(torch.float64) + x.detach().type_as(x) + x.data,
    "as other": lambda x: torch.arange(3).to(x) * 1.5,
    "complex": lambda x: torch.view_as_real(torch.polar(x.abs(), x) * torch.complex(x, x)),
    "as complex": lambda x: torch.view_as_complex(x.unflatten(2, (4, 2))).abs(),
    "likes": lambda x: (torch.zeros_like(x), torch.full_like(x, 3.0) * x, x.new_ones(3)),
    "drawn": drawn,
    "where": lambda x: torch.where(condition=x > 0, input=x, other=0.5),
    "where is it": lambda x: torch.where(x > 0)[0].double(),
    "facts": lambda x: x * (len(x) + x.numel() + x.dim() + x.size(1) + x.is_contiguous()),
    "item": lambda x: x * x.sum().item() + float(x.detach()[0, 0, 0]) + bool((x > -100).all()),
    "to python": lambda x: (
        torch.tensor(x.tolist(), dtype=x.dtype) + torch.from_numpy(x.detach().numpy().copy())
    ),
    "formatted": lambda x: x * len(f"{x.detach().sum():.3f}"),
    "copied": lambda x: copy.deepcopy(x.detach()) * x.clone(),
    "hooked": hooked,
    "out": added_out,
    "views follow": views_follow,
    "base changes views": base_changes_views,
    "no dropout": lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False),
}
SHAPES = {
    "view": lambda x: (x.view(4, 48), x.view(24, -1), x.reshape((2, 2, 3, 2, 8))),
    "flatten": lambda x: (x.flatten(1), torch.flatten(x), x.ravel(), x.flatten(0, 1)),
    "unflatten": lambda x: x.unflatten(-1, (2, 4)),
    "squeeze": lambda x: (x[:, None].squeeze(), x.unsqueeze(-1), x.unsqueeze(1).squeeze(1)),
    "permute": lambda x: (x.permute(2, 0, 1), x.permute((1, 2, 0)), x.movedim(0, -1)),
    "transpose": lambda x: (x.mT, x.transpose(0, -1), torch.swapaxes(x, 0, 1), x[:, 0].t()),
    "transposed": lambda x: (x[0].T, x[:, :, 0].H),
    "expand": lambda x: (x[:, :, None].expand(-1, -1, 3, -1), x.expand(2, 4, 6, 8)),
    "expand as": lambda x: (x[:1].expand_as(x) if x.dim() else x, torch.ones(8).expand_as(x)),
    "broadcast": lambda x: torch.broadcast_tensors(x, torch.ones(1, 8, dtype=x.dtype)),
    "repeat": lambda x: (x.repeat(1, 2, 1), x.repeat(2, 1, 1, 3), x.tile(2), torch.tile(x, (3, 1))),
    "interleave": lambda x: (x.repeat_interleave(3, 1), torch.repeat_interleave(x, 2, dim=-1)),
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: torch.roll(x, (1, 2), (0, 1)),
    "roll all": lambda x: x.roll(3),
    "split": lambda x: (*x.split(2, 1), *torch.split(x, [1, 2, 5], dim=-1)),
    "split by name": lambda x: (*x.split(split_size=3, dim=1), *torch.tensor_split(x, 2, 1)),
    "chunk": lambda x: x.chunk(3, 1),
    "unbind": lambda x: (*x.unbind(1), *(row * 2 for row in x)),
    "cat": lambda x: (torch.cat([x, x * 2], 1), torch.cat(tensors=(x, x), dim=0)),
    "stack": lambda x: (torch.stack([x, x * 2], 1), torch.stack([x, x], -1)),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad rows": lambda x: F.pad(x, (0, 0, 1, 1)),
    "triangle": lambda x: x.tril() + torch.triu(x, 1),
    "windows": lambda x: x.unfold(1, 3, 2),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "narrow": lambda x: (x.narrow(-1, 2, 3), torch.narrow(x, 1, -2, 2), x.select(1, 2)),
    "fourier": lambda x: torch.view_as_real(torch.fft.rfft(x)),
}
INDICES = {
    "number": lambda x: x[1],
    "numbers": lambda x: x[:, 1] + x[..., -1, :],
    "range": lambda x: x[:, None, 2:4, ::2],
    "last range": lambda x: (x[:, -2:], x[:, 3:3]),
    "all": lambda x: x[...] + x[:],
    "rows": lambda x: (x[:, PICKED], x[:, PICKED, None], x[:, [0, 2]]),
    "rows in front": lambda x: (x[None, :, PICKED[None]], x[1, PICKED]),
    "two, apart": lambda x: x[ROWS, :, COLUMNS],
    "two, side by side": lambda x: x[ROWS, PICKED[:3]],
    "two and a new one": lambda x: x[ROWS, None, PICKED[:3]],
    "number of a tensor": lambda x: x[torch.tensor(1)],
    "mask": lambda x: x[:, MASK],
    "mask of values": lambda x: x[x > 0].sum() + x.masked_select(x > 1).sum(),
    "odd": lambda x: x[True],
    "index_select": lambda x: x.index_select(1, PICKED),
    "gather": lambda x: (torch.gather(x, 1, PLACES), x.gather(dim=1, index=PLACES)),
    "take_along": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "one hot": lambda x: F.one_hot((x > 0).long(), 3) + x[..., None],
    "scatter value": lambda x: x.scatter(1, PLACES, 2.0),
}
ALONG = {
    "softmax": lambda x: x.softmax(-1) + F.log_softmax(x, dim=-1) + torch.softmax(x, 2, x.dtype),
    "cumsum": lambda x: x.cumsum(1) + torch.cumsum(x, dim=1),
    "sort": lambda x: (*x.sort(-1), x.argsort(dim=-1)),
    "normalize": lambda x: (F.normalize(x, dim=-1), F.glu(x, -1)),
    "normalize rows": lambda x: F.normalize(x),
    "sum": lambda x: (x.sum(), x.sum(1), torch.sum(x, (0, 2), keepdim=True), (x > 0).sum(1)),
    "mean": lambda x: (x.mean(), x.mean(-1, keepdim=True), torch.mean(x, dim=[0, 1])),
    "highest": lambda x: (x.amax(1), x.max(1).values, x.argmax(1), x.max(1)[1], x.amin((1,))),
    "highest of all": lambda x: x.max() + x.norm() + x.std(),
    "spread": lambda x: (x.var(1), *torch.var_mean(x, dim=1), x.std(1, unbiased=False)),
    "norms": lambda x: (x.norm(dim=-1), torch.linalg.vector_norm(x, dim=-1), x.logsumexp(-1)),
    "topk": lambda x: (*x.topk(3, -1), x.topk(2, dim=-1, largest=False)[0], x.median(-1)[0]),
    "truths": lambda x: ((x > 0).any(1), (x > 0).all(1), (x > 0).any()),
    "cross entropy": lambda x: F.cross_entropy(x, PLACES[:, 0], reduction="none") + 0 * x.sum(),
}
IMAGES = {
    "max": lambda x: (F.max_pool2d(x, 2), *F.max_pool2d(x, 3, 2, 1, return_indices=True)),
    "average": lambda x: (F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, (3, 2))),
    "global": lambda x: (x.mean([2, 3]), F.adaptive_avg_pool2d(x, 1).flatten(1)),
    "resize": lambda x: (
        F.interpolate(x, scale_factor=2) + F.interpolate(x, (16, 16), mode="bicubic")
    ),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.repeat_interleave(4, 1), 2),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 3),
    "unfold": lambda x: F.fold(F.unfold(x, 2, stride=2), 8, 2, stride=2),
    "grid": lambda x: F.grid_sample(x, GRID, align_corners=False),
    "borders": lambda x: (
        F.pad(x, (1, 1, 1, 1), mode="reflect") + F.pad(x, (1, 1, 1, 1), "circular")
    ),
    "windows": lambda x: x.view(4, 6, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 6),
    "instance": lambda x: F.instance_norm(x),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
}
