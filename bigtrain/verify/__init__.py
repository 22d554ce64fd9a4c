"""Proof of the same numbers as one process: `bigtrain verify`.

What is recorded of a run; whose masks dropout draws; how two recordings are compared; the
tolerance; where, in which operation of which block, a difference begins; which plans are drawn, and
how a failure is made small.
"""
