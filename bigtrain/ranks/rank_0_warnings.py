"""What every rank would say alike is said by rank 0: warnings of Python and of model libraries."""

from __future__ import annotations

import logging
import os
import sys
import warnings

_LIBRARIES = ("transformers", "huggingface_hub", "datasets", "diffusers", "accelerate", "timm")
"""Whose loggers say the same of the same model on every rank."""
_VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""What these libraries read when they are imported; the user's own values stay."""


def warn_on_rank_0(rank: int) -> None:
    """Keep warnings of a rank to itself, unless it is rank 0; errors are never kept.

    Nothing is changed where the user has said what becomes of warnings (`python -W`,
    PYTHONWARNINGS).
    """
    if rank == 0 or sys.warnoptions:
        return
    for kind in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", kind)
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
