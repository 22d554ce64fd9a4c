"""What is minimised: a loss is a sum over valid targets together with their count.

Tasks and their validation figures; which means a user's own loss is made of, and what each counts
over the global batch; cross entropy in chunks with the output projection.
"""
