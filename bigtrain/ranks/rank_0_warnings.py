"""Warnings of Python and of model libraries are printed by rank 0 alone."""

from __future__ import annotations

import logging
import os
import sys
import warnings

_LIBRARIES = ("transformers", "huggingface_hub", "datasets", "diffusers", "accelerate", "timm")
"""Libraries whose loggers would print the same warnings on every rank."""
_VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Variables that these libraries read on import; values that the user has set are not replaced."""


def warn_on_rank_0(rank: int) -> None:
    """Suppress warnings on all ranks except rank 0; errors are never suppressed.

    Nothing is changed if the user has configured warnings (`python -W`, PYTHONWARNINGS).

    Args:
        rank: the rank of this process.
    """
    if rank == 0 or sys.warnoptions:
        return
    for kind in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", kind)
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
