"""Runs of a model on fake tensors: made once, then interpolated for other rows and finer slices."""
