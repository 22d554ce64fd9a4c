"""Calls of a custom training loop besides `step`: learning rates, metrics, outputs, batches.

Decides: how schedules follow the steps; how figures of a validation are averaged; which keys of a
job a loop follows; what inputs a model is called with; which rows a loop's loader gives a rank.
"""
