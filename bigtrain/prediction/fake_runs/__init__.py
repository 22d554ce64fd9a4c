"""Make runs of a model on fake tensors, and interpolate them for other rows and finer slices."""
