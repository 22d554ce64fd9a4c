"""Torch's functions on slices: results and gradients equal one process; which calls gather."""

import pytest
from support import calls_of_more, calls_of_one
from support.ranks import run_ranks
from support.sliced import slice_group
from support.sliced_calls import X, compare_call, mixed_slices, single_slices

ONE = {
    f"{kind} {name}": ((shape,), function)
    for kind, shape in (
        *((kind, X) for kind in ("ELEMENTS", "SHAPES", "INDICES", "ALONG")),
        ("IMAGES", (*X, 8)),
    )
    for name, function in getattr(calls_of_one, kind).items()
}
MORE = {
    f"{kind} {name}": call
    for kind in ("ELEMENTS", "PIECES", "PRODUCTS", "CONVOLUTIONS", "NORMS")
    for name, call in getattr(calls_of_more, kind).items()
}
KINDS = {"one": ONE, "more": {f"MORE {name}": call for name, call in MORE.items()}}

# For each call: number and dim of the tensors whose slices alone make it gather whole tensors.
WHOLE = {
    "ELEMENTS where is it": "0.0 0.1 0.2",
    "ELEMENTS item": "0.0 0.1 0.2",
    "ELEMENTS to python": "0.0 0.1 0.2",
    "ELEMENTS out": "0.0 0.1 0.2",
    "ELEMENTS views follow": "0.0 0.1 0.2",
    "ELEMENTS base changes views": "0.0 0.1 0.2",
    "SHAPES view": "0.1",
    "SHAPES transpose": "0.1",
    "SHAPES transposed": "0.0 0.2",
    "SHAPES expand as": "0.0",
    "SHAPES flip": "0.0 0.2",
    "SHAPES roll": "0.0 0.1",
    "SHAPES roll all": "0.0 0.1 0.2",
    "SHAPES split": "0.1 0.2",
    "SHAPES split by name": "0.1",
    "SHAPES chunk": "0.1",
    "SHAPES unbind": "0.0 0.1",
    "SHAPES pad": "0.2",
    "SHAPES pad rows": "0.1",
    "SHAPES triangle": "0.1 0.2",
    "SHAPES windows": "0.1",
    "SHAPES diagonal": "0.0 0.1 0.2",
    "SHAPES narrow": "0.1 0.2",
    "SHAPES fourier": "0.2",
    "INDICES number": "0.0",
    "INDICES numbers": "0.1",
    "INDICES range": "0.1 0.2",
    "INDICES last range": "0.1",
    "INDICES rows": "0.1",
    "INDICES rows in front": "0.0 0.1",
    "INDICES two, apart": "0.0 0.2",
    "INDICES two, side by side": "0.0 0.1",
    "INDICES two and a new one": "0.0 0.1",
    "INDICES number of a tensor": "0.0",
    "INDICES mask": "0.1",
    "INDICES mask of values": "0.0 0.1 0.2",
    "INDICES odd": "0.0 0.1 0.2",
    "INDICES index_select": "0.1",
    "INDICES gather": "0.1",
    "INDICES take_along": "0.1",
    "INDICES scatter value": "0.1",
    "ALONG softmax": "0.2",
    "ALONG cumsum": "0.1",
    "ALONG sort": "0.2",
    "ALONG normalize": "0.2",
    "ALONG normalize rows": "0.1",
    "ALONG highest": "0.1",
    "ALONG highest of all": "0.0 0.1 0.2",
    "ALONG spread": "0.1",
    "ALONG norms": "0.2",
    "ALONG topk": "0.2",
    "ALONG truths": "0.0 0.1 0.2",
    "IMAGES max": "0.2 0.3",
    "IMAGES average": "0.2 0.3",
    "IMAGES global": "0.2 0.3",
    "IMAGES resize": "0.2 0.3",
    "IMAGES pixel shuffle": "0.2 0.3",
    "IMAGES pixel unshuffle": "0.2 0.3",
    "IMAGES channel shuffle": "0.1",
    "IMAGES unfold": "0.2 0.3",
    "IMAGES grid": "0.2 0.3",
    "IMAGES borders": "0.2 0.3",
    "IMAGES instance": "0.0 0.2 0.3",
    "MORE ELEMENTS changed": "1.0 1.1",
    "MORE PIECES cat short": "0.1",
    "MORE PIECES set row": "0.1 1.0 1.1",
    "MORE PIECES set range": "0.2 1.0 1.1",
    "MORE PIECES set rows": "0.1 1.0 1.1",
    "MORE PIECES set corner": "0.0 0.1",
    "MORE PIECES set plain": "0.0 0.1",
    "MORE PIECES scatter": "0.1 1.1",
    "MORE PIECES scatter in place": "0.1 1.0 1.1 1.2",
    "MORE PIECES index add": "0.1 1.0 1.1 1.2",
    "MORE PIECES index copy": "0.1 1.0 1.1 1.2",
    "MORE PIECES masked scatter": "0.0 0.1 0.2 1.0",
    "MORE PIECES table": "0.0",
    "MORE PRODUCTS matmul vector": "0.0",
    "MORE PRODUCTS einsum diagonal": "0.0 0.1",
    "MORE PRODUCTS inner": "0.0 0.1 1.0 1.1",
    "MORE PRODUCTS embedding bag": "0.0 0.1",
    "MORE PRODUCTS attention": "0.2 0.3 1.2 1.3 2.2",
    "MORE PRODUCTS attention masked": "0.2 0.3 1.2 1.3 2.2 3.1 3.2",
    "MORE PRODUCTS attention shared": "0.2 0.3 1.2 1.3 2.2",
    "MORE PRODUCTS attention of one": "0.2 0.3 1.2 1.3 2.2",
    "MORE CONVOLUTIONS plain": "0.2 0.3 1.2 1.3",
    "MORE CONVOLUTIONS one dim": "0.2 1.2",
    "MORE CONVOLUTIONS unbatched": "0.1 0.2 1.2 1.3",
    "MORE CONVOLUTIONS depthwise": "0.2 0.3 1.2 1.3",
    "MORE CONVOLUTIONS depthwise, wider": "0.2 0.3 1.2 1.3",
    "MORE CONVOLUTIONS grouped": "0.2 0.3 1.2 1.3",
    "MORE CONVOLUTIONS transposed": "0.2 0.3 1.2 1.3",
    "MORE CONVOLUTIONS transposed, grouped": "0.2 0.3 1.2 1.3",
    "MORE NORMS layer": "0.2 1.0 2.0",
    "MORE NORMS layer by name": "0.2 1.0",
    "MORE NORMS layer of two": "0.1 0.2 1.0 1.1",
    "MORE NORMS root mean square": "0.2 1.0",
    "MORE NORMS batch": "0.0 0.2",
    "MORE NORMS batch, evaluated": "0.0 0.2",
    "MORE NORMS instance": "0.0 0.2",
    "MORE NORMS group": "0.2 1.0 2.0",
}


def all_calls(context, kind, count):
    results = []
    for name, (shapes, function) in KINDS[kind].items():
        group = slice_group(context)
        for slices in single_slices(shapes, group.size):
            result = compare_call(name, function, shapes, slices, group)
            ((number, tensor_slices),) = slices.items()
            results.append((name, f"{number}.{tensor_slices.dim}", result))
        for slices in mixed_slices(name, shapes, group.size, count):
            results.append((name, "", compare_call(name, function, shapes, slices, group)))
    return results


def wrong_and_whole(kind, ranks, count):
    """Return wrong results, and for each call the tensors and dims whose slices are gathered."""
    wrong, whole = [], {}
    # All calls on four ranks take 42 s on two idle cores.
    runs = run_ranks(all_calls, ranks, kind, count, tp=ranks, timeout_s=240.0)
    for results_by_rank in zip(*runs, strict=True):
        for name, _, result in results_by_rank:
            wrong += [(name, result.slices, text) for text in result.wrong]
        name, where, result = results_by_rank[0]
        if where and result.gathers:
            whole.setdefault(name, []).append(where)
    return wrong, {name: " ".join(places) for name, places in whole.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_on_slices(kind):
    wrong, whole = wrong_and_whole(kind, 2, 2)
    assert not wrong
    assert whole == {name: places for name, places in WHOLE.items() if name in KINDS[kind]}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_on_slices_of_more_ranks(kind, ranks):
    wrong, _ = wrong_and_whole(kind, ranks, 30)
    assert not wrong
