"""Checkpoints of other libraries, read tensor by tensor and without running their code."""
