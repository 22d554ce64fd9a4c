"""The engine, which trains one global batch with each call of `step`.

This package opens the data and the model of a job. It has `prepare` for custom loops, the engine's
checkpoints, out-of-memory messages with remedies, and random streams. It chooses the loss of a run.
"""
