"""Extents compared with the elements that they name; boxes and slices compared with torch's
indexing.
"""

from __future__ import annotations

import math
import random

import torch

from bigtrain.tensors.shards import Extent, box_extents, slice_extents


def elements(extents):
    return [
        extent.start + number * extent.pitch + inside
        for extent in extents
        for number in range(extent.count)
        for inside in range(extent.length)
    ]


def drawn_extent(draw):
    length = draw.randint(1, 5)
    return Extent(draw.randint(0, 5), length, draw.randint(1, 5), length + draw.randint(0, 4))


def drawn_shape(draw):
    return [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]


def test_elements_within_bounds_have_their_extents():
    draw = random.Random(0)
    for _ in range(5000):
        extent = drawn_extent(draw)
        begin = draw.randint(0, 60)
        end = begin + draw.randint(1, 40)
        by_position = {}
        for position, part in extent.within(begin, end):
            by_position |= {position + n: e for n, e in enumerate(elements([part]))}
        everything = enumerate(elements([extent]))
        assert by_position == {n: e for n, e in everything if begin <= e < end}, (
            extent,
            begin,
            end,
        )


def test_a_range_of_the_values_has_its_extents_in_the_whole():
    draw = random.Random(1)
    for _ in range(5000):
        extent = drawn_extent(draw)
        begin = draw.randint(0, extent.size)
        end = draw.randint(begin, extent.size + 2)
        elements_found = elements(extent.at(begin, end))
        assert elements_found == elements([extent])[begin:end], (extent, begin, end)


def test_scaled_extents_are_the_bytes_of_the_elements():
    draw = random.Random(2)
    for _ in range(500):
        extent, factor = drawn_extent(draw), draw.choice((1, 2, 4, 8))
        wanted = [e * factor + byte for e in elements([extent]) for byte in range(factor)]
        assert elements([extent.scaled(factor)]) == wanted


def test_a_box_is_what_torch_cuts_out():
    draw = random.Random(3)
    for _ in range(2000):
        shape = drawn_shape(draw)
        offset = [draw.randint(0, size - 1) for size in shape]
        local = [draw.randint(0, size - o) for size, o in zip(shape, offset, strict=True)]
        whole = torch.arange(math.prod(shape)).view(shape)
        box = whole[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))]
        assert elements(box_extents(shape, offset, local)) == box.reshape(-1).tolist()


def test_a_slice_of_memory_has_its_elements_in_any_order_of_dims():
    draw = random.Random(4)
    for _ in range(2000):
        shape = drawn_shape(draw)
        order = draw.sample(range(len(shape)), len(shape))
        back = [order.index(dim) for dim in range(len(shape))]
        strided = torch.empty([shape[dim] for dim in order], dtype=torch.long).permute(back)
        strided.copy_(torch.arange(strided.numel()).view(strided.shape))
        start = draw.randint(0, strided.numel())
        stop = draw.randint(start, strided.numel())
        wanted = strided.as_strided((strided.numel(),), (1,))[start:stop].tolist()
        assert elements(slice_extents(strided, start, stop)) == wanted, (
            strided.stride(),
            start,
            stop,
        )
