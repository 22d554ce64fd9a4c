"""Masks of transformers' models are in a forecast only if the run makes them."""

from __future__ import annotations

import pytest
import torch

from bigtrain.tensors.fake_mode import FakeMode
from bigtrain.tracing.call_hooks import pretend_compiling

pytest.importorskip("transformers")


def test_ids_that_a_model_numbers_are_not_packed_on_fakes_either():
    from transformers import masking_utils

    own = torch.arange(5)[None]
    packed = torch.tensor([[0, 1, 2, 0, 1]] * 2)
    with FakeMode() as mode:
        fakes = [mode.from_tensor(ids) for ids in (own, packed)]
        find = masking_utils.find_packed_sequence_indices
        assert find(fakes[0]) is None
        assert find(fakes[0].expand(3, -1)) is None
        assert find(fakes[1]).shape == (2, 5)
        with pretend_compiling():  # a stage makes the mask in the run, too
            assert find(fakes[0]).shape == (1, 5)
    assert find(own.to("meta")) is None
    assert find(own) is None
    assert find(packed).tolist() == [[0, 0, 0, 1, 1]] * 2
    FakeMode()
    assert masking_utils.find_packed_sequence_indices is find
