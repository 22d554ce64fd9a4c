"""Checks that a strategy computes the same numbers as one process: `bigtrain verify`.

The package records runs, and makes dropout draw the same masks in all of them. It compares two
recordings with a tolerance, and finds the first operation that differs. It also draws random plans
to verify, and reduces plans that fail.
"""
