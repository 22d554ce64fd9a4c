"""Find the fastest plan that fits, before a run: `bigtrain plan` and `--strategy auto`.

Decides the search space, the order of the search and its lower bounds; how a candidate is cut into
stages, and which recompute policies its blocks get so that every rank fits its memory limit; how
the table of plans and the Pareto front are shown.
"""
