"""Calls of a custom training loop other than `step`: learning rates, metrics, outputs, batches.

This package decides how learning rates follow the steps, how figures of a validation are averaged,
and which keys of a job have an effect in a custom loop. It also decides with which arguments a
model is called, and which rows the loader of a loop gives each rank.
"""
