"""The fastest plan that fits, before anything runs: `bigtrain plan` and `--strategy auto`.

What is searched, in which order, with which bounds; how a candidate is cut and recomputed to fit;
a rank's memory limit; the table of plans and its Pareto front.
"""
