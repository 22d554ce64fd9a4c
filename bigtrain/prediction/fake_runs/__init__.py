"""Runs of a model on fake tensors: made once, and read off for other rows and finer slices."""
