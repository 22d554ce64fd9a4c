"""Losses: each is a sum over valid targets together with their count.

Tasks and their validation figures; the means in a user's loss and their divisors over the global
batch; cross entropy in chunks with the output projection.
"""
