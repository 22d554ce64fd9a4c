"""What a strategy is, and the plain loop that runs wherever no strategy owns the step.

The contract (`Strategy`, `Plan`, `Assembly`, `Runner`) and what a technique offers the planner; the
order in which techniques are applied; forward, backward, clipping, update; averaging over
replicas; the table of techniques.
"""
