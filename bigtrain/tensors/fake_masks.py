"""Masks of transformers' models on fake and meta tensors: made there only if a run makes them.

Without a mask a causal model of transformers looks at its position ids for packed documents, and
finds none in those that it numbers itself. It cannot read fake ids, and takes them for packed: then
a forecast has a mask of seq x seq, and attention that is not fused, which the run has not. Reading
meta ids fails, and fake tensors, which are slower, have to replace them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


def leave_out_unneeded_masks() -> None:
    """Let transformers, if it is loaded, find no packed documents in ids that a model numbers.

    Such ids have one row for all samples. While a stage is traced or run (`pretend_compiling`),
    nothing changes: there the model makes the mask in the run, too.
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
