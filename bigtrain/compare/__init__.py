"""Strategies side by side on one job: `bigtrain compare` and `bigtrain strategies`.

Which strategies can run, and why not; their processes and time limits; the page and its pictures;
`--largest`.
"""
