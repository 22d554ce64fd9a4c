"""Tensor parallelism: tensors of a layer sliced over the ranks of the tp axis.

Decides: how a tensor lies on the ranks; what is exchanged where slices meet whole tensors.
"""
