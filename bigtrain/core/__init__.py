"""The interface of strategies, and the plain loop for steps that no strategy owns.

The contract (`Strategy`, `Plan`, `Assembly`, `Runner`) and what a technique offers the planner; the
order in which techniques are applied; forward, backward, clipping, update; averaging over
replicas; the table of techniques.
"""
