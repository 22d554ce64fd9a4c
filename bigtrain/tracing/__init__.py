"""A forward pass on fake tensors, recorded.

What is seen of a model: calls of modules, tensors with their makers and users, in-place writes,
state of modules, costs of operations; which
parameters the loss does not reach.
"""
