"""Compares strategies on one job and lists them: `bigtrain compare` and `bigtrain strategies`.

The package decides which strategies can run, and why others cannot. It starts and ends the measured
runs, draws the page and its pictures, and finds the largest value of a key for `--largest`.
"""
