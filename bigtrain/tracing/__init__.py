"""A forward pass on fake tensors, written down."""
