"""Find the fastest plan that fits, before a run: `bigtrain plan` and `--strategy auto`.

The search space, its order and its bounds; how a candidate is cut and recomputed to fit; a rank's
memory limit; the table of plans and its Pareto front.
"""
