"""The loss of a run: its choice, and the divisors of a user's loss.

This package decides whether the loss is computed in chunks, and which loss data without a task get.
It finds the counts over which a user's loss averages, and tests them.
"""
