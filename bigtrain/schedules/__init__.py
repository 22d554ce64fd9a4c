"""Pipeline schedules as data: the rank, stage and micro-batch of each pass, in order.

The package computes the order of actions, the micro-batches in flight, the messages between ranks,
and the idle time of ranks (the bubble).
"""
