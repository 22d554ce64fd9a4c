"""What a block keeps from its forward pass to its backward pass.

Activation checkpointing, full and selective; activation offload; the exact choice for each block
under a budget.
"""
