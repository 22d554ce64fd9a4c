"""Predict the seconds of a step before it runs, from a cluster's rates or from timed blocks.

Decides how the seconds of operations, passes, schedules, exchanges and updates are predicted; which
blocks are timed, how often, within which limits, and where the times are cached.
"""
