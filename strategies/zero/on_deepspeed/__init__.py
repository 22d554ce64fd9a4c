"""ZeRO by DeepSpeed's engine."""
