"""Strategies side by side on one job: `bigtrain compare` and `bigtrain strategies`.

Decides: which strategies can run, and why others cannot; how measured runs are started and ended;
the page and its pictures; `--largest`.
"""
