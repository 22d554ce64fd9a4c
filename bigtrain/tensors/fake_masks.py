"""Masks of transformers' models on fake and meta tensors: made only if a real run makes them.

A causal model of transformers that gets no mask searches its position ids for packed documents. In
ids that the model has numbered itself there are none. But transformers cannot read fake ids, and
treats them as packed: a forecast would then have a mask (seq, seq) and attention that is not fused,
and the real run has neither. Reading meta ids raises an error, after which a forecast would have to
use fake tensors, which are slower.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


def leave_out_unneeded_masks() -> None:
    """Patch transformers, if it is loaded, to find no packed documents in ids that a model numbers.

    Such ids have one row for all samples. While a stage is traced or run (`pretend_compiling`), the
    patch changes nothing: in that case the model makes the mask in a real run as well.
    """
    module = sys.modules.get(_MODULE)
    find = getattr(module, _FUNCTION, None)
    if module is None or find is None or hasattr(find, "_finds_none_in_fakes"):
        return

    @functools.wraps(find)
    def found(position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        is_empty = isinstance(position_ids, FakeTensor) or position_ids.is_meta
        reads = not is_empty or torch.compiler.is_compiling()
        if not reads and position_ids.dim() == 2 and _has_one_row(position_ids):
            return None
        return find(position_ids, *args, **kwargs)

    vars(found)["_finds_none_in_fakes"] = True
    setattr(module, _FUNCTION, found)


def _has_one_row(position_ids: torch.Tensor) -> bool:
    """Whether ids are one row, or one row that was expanded to all samples."""
    return position_ids.shape[0] == 1 or position_ids.stride(0) == 0
