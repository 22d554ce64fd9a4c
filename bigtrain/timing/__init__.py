"""Predict the seconds of a step before it runs: from a cluster's rates, or from blocks timed here.

Seconds of operations, passes, schedules, exchanges and updates; which blocks are timed, how often,
within which limits, and where the times are cached.
"""
