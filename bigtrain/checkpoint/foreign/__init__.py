"""Checkpoints of other libraries, read tensor by tensor and without running any code of theirs."""
