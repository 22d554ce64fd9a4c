"""Optimizers on whole, sharded or offloaded parameters, and updates in the backward pass.

The package has the optimizers and learning rates of jobs, bf16, 8-bit and 4-bit optimizer state,
the division of the parameters into slices that ranks update, the storage of optimizer state between
steps, and updates inside the backward pass.
"""
