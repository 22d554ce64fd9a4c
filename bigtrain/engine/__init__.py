"""The engine, with one `step` for each global batch, and its surroundings.

Opening data and model; the library's `prepare`; checkpoints and resuming; out-of-memory messages,
remedies and smaller micro-batches; seeds (dropout); whether the loss is chunked.
"""
