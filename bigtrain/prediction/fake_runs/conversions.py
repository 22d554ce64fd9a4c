"""What is known without a run of parameters that autocast converts at each use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bigtrain.prediction.section_library import ModelSections
from bigtrain.prediction.sections import OpLog, Section, SectionTensor

CONVERSION_BYTES = 6
"""For each number: of an fp32 weight that is read and written in bf16, and of its gradient."""


def with_conversions(model: ModelSections) -> ModelSections:
    """A model of bf16 parameters as one of fp32 parameters that autocast converts, at the least.

    The matrices of its blocks are converted in each pass, and so are their gradients. What autocast
    computes in fp32, and keeps for that, is left out: a run of such a model is no faster, and keeps
    no less.
    """
    known: dict[tuple[int, ...], Section] = {}

    def converting(section: Section) -> Section:
        key = (id(section.tensors), id(section.forward), id(section.backward))
        if key not in known:
            low = [t for t in section.tensors if _is_low(t)]
            matrices = [t for t in low if section.name and len(t.shape) > 1]
            used, trained = (
                sum(t.numbers for t in matrices if t.trained or not back) for back in (False, True)
            )
            known[key] = replace(
                section,
                tensors=tuple(_widened(t) for t in section.tensors),
                forward=_with_bytes(section.forward, CONVERSION_BYTES * used),
                backward=_with_bytes(section.backward, CONVERSION_BYTES * trained),
            )
        one = known[key]
        return replace(section, tensors=one.tensors, forward=one.forward, backward=one.backward)

    sections = tuple(converting(section) for section in model.sections)
    return ModelSections(replace(model.base), sections)  # profiles are kept by the base


def _widened(tensor: SectionTensor) -> SectionTensor:
    if not _is_low(tensor):
        return tensor
    return replace(tensor, nbytes=2 * tensor.nbytes, kind=f"{tensor.kind}, widened")


def _is_low(tensor: SectionTensor) -> bool:
    """Whether it is a parameter of two bytes a number."""
    return not tensor.is_buffer and tensor.nbytes == 2 * tensor.numbers


def _with_bytes(work: OpLog, nbytes: int) -> OpLog:
    """With one more operation, that reads and writes so much."""
    if not nbytes:
        return work
    row = (0.0, 0.0, float(nbytes), 1.0)
    logs = (work.flops, work.low_flops, work.nbytes, work.times)
    flops, low_flops, moved, times = (np.append(log, n) for log, n in zip(logs, row, strict=True))
    return OpLog(flops, low_flops, moved, times, np.vstack([work.products, np.zeros((1, 4))]))
