"""With a torch that lacks a loss function, only the existing ones are looked up."""

from __future__ import annotations

import subprocess
import sys

SAID = """
import torch.nn.functional as F
if hasattr(F, "linear_cross_entropy"):
    del F.linear_cross_entropy
from bigtrain.losses import chunked_cross_entropy, loss_divisors
print([loss.__name__ for loss in loss_divisors.BY_TARGET])
"""


def test_losses_go_without_what_torch_2_11_has_not() -> None:
    ran = subprocess.run([sys.executable, "-c", SAID], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['cross_entropy', 'nll_loss']"
