"""The rules of torch's functions for sliced tensors.

Decides: which functions compute on a rank's slices, and what is exchanged where they cannot.
"""
