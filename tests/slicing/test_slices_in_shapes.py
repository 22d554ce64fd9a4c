"""Slices after a reshape, compared element by element."""

import math
import random

import torch
from support.sliced import drawn_slices

from bigtrain.slicing.rules.shapes import resized
from bigtrain.slicing.slices import reshaped


def shapes_of(draw):
    """Two shapes with equally many elements."""
    primes = [draw.choice([1, 2, 2, 2, 3, 3, 5]) for _ in range(draw.randint(2, 6))]

    def grouped():
        draw.shuffle(primes)
        shape, remaining = [], list(primes)
        while remaining:
            count = draw.randint(1, len(remaining))
            shape.append(math.prod(remaining[:count]))
            remaining = remaining[count:]
        return tuple(shape)

    return grouped(), grouped()


def test_slices_of_another_shape_hold_the_same_elements():
    draw, found_some = random.Random(0), 0
    for _ in range(800):
        shape, target = shapes_of(draw)
        size = draw.choice([2, 3, 4])
        dims = [dim for dim, length in enumerate(shape) if length >= size]
        if not dims:
            continue
        dim = draw.choice(dims)
        slices = drawn_slices(draw, dim, shape[dim], size)
        result = reshaped(slices, shape, target, size)
        whole = torch.arange(math.prod(shape)).view(shape)
        parts = [slices.local(whole, rank, size) for rank in range(size)]
        if target == shape:
            assert result is not None
        if result is None:
            continue
        found_some += target != shape
        for rank, part in enumerate(parts):
            slice_part = result.local(whole.view(target), rank, size)
            assert torch.equal(part.reshape(result.local_shape(target, rank, size)), slice_part)
        assert torch.equal(
            result.join(
                [p.reshape(result.local_shape(target, r, size)) for r, p in enumerate(parts)]
            ),
            whole.view(target),
        )
    assert found_some > 100


def test_a_reshape_between_heads_and_width_is_always_known():
    draw = random.Random(1)
    for _ in range(300):
        size, heads, head = draw.choice([2, 3]), draw.randint(3, 9), draw.choice([1, 2, 4])
        slices = drawn_slices(draw, 1, heads, size, units=(1,))
        apart = reshaped(slices, (2, heads, head), (2, heads * head), size)
        assert apart is not None
        again = reshaped(apart, (2, heads * head), (2, heads, head), size)
        assert again is not None
        assert again.same(slices, size)
        assert again.dim == 1


def test_channels_that_become_more_or_fewer_stay_with_their_rank():
    draw, done = random.Random(2), 0
    for _ in range(500):
        size, length = draw.choice([2, 3]), draw.choice([12, 24, 36])
        slices = drawn_slices(draw, 0, length, size)
        whole = torch.arange(length)
        more = resized(slices, 1, 4, size)
        assert more is not None
        for rank in range(size):
            part = slices.local(whole, rank, size)
            wanted = (part[:, None] * 4 + torch.arange(4)).flatten()
            assert torch.equal(more.local(torch.arange(4 * length), rank, size), wanted)
        fewer = resized(slices, 2, 1, size)
        if fewer is not None:
            done += 1
            again = resized(fewer, 1, 2, size)
            assert again is not None
            assert again.same(slices, size)
    assert done > 50
