"""Proof that a strategy computes the numbers of one process: `bigtrain verify`.

Decides: what a recording of a run has; how dropout draws masks; how two recordings are compared,
and with which tolerance; how the first operation that differs is found; which plans are drawn, and
how a failing one is reduced.
"""
