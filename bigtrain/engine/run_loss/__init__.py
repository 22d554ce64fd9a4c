"""The loss that a run is trained with: chosen, inferred from shapes, followed and tried.

Decides: whether the loss is chunked; which loss data without a task have; what a user's loss
averages over.
"""
