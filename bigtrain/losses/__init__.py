"""What is minimised: a loss is a sum over valid targets together with their count.

Tasks and their validation figures; a user's own mean loss; cross entropy in chunks with the output
projection.
"""
