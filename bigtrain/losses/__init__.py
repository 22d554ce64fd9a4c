"""Losses: each is a sum over valid targets together with their count.

Decides the tasks of data sets and their validation figures; how the means in a user's loss are
found, and how they then divide by the counts of the global batch; how cross entropy is computed in
chunks, together with the output projection.
"""
