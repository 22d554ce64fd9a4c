"""Pipeline schedules as data: which rank runs which stage of which micro-batch, and when.

The order of actions; micro-batches in flight; messages between ranks; idle time (the bubble).
"""
