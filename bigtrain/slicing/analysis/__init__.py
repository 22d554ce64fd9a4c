"""Which dims of which tensors of a model could be sliced together, read off one run of it."""
