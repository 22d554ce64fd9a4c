"""ZeRO on PyTorch's own parts."""
