"""How long a step takes, before it runs: by a cluster's figures, or by blocks timed here.

Seconds of operations, passes, schedules, exchanges and updates; what is timed, how often, under
which limits, and where it is kept.
"""
