"""What functions of torch do with sliced tensors, on each rank's own slices.

Which functions act on slices as they are, and what is exchanged where they do not.
"""
