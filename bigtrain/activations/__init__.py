"""The activations that a block saves between its forward and its backward pass.

Activation checkpointing, full and selective; activation offload; the exact choice of a policy for
each block under a budget.
"""
