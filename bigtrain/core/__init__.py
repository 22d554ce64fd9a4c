"""What a strategy is, and the plain loop that runs wherever no strategy owns the step.

The contract (`Strategy`, `Plan`, `Assembly`, `Runner`) and what a technique offers the planner; the
order of composition; forward, backward, clipping, update; averaging over replicas; the table of
techniques.
"""
