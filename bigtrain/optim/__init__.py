"""Optimizers over whole, sharded, offloaded or released parameters.

Optimizers and learning rates; bf16, 8-bit and 4-bit state; which slice of the parameters a rank
updates; where optimizer state lives; updates inside the backward pass.
"""
