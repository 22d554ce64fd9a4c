"""The memory and the traffic of a plan, as data.

Profile, forecast and traffic of a rank; lower bounds on its states; a pipeline rank's step
replayed from recorded micro-batches.
"""
