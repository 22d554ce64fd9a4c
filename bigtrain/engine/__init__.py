"""One `step` for each global batch, and what surrounds it.

Opening data and model; the library's `prepare`; checkpoints and resuming; out-of-memory messages,
remedies and smaller micro-batches; seeds (dropout); whether the loss is chunked.
"""
