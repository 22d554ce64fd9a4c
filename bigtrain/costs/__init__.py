"""The memory and the traffic of a plan, as data.

This package has the profile and the forecast of a rank's memory, and the messages that a rank
exchanges in a step. It computes lower bounds on the bytes of a rank's states. It replays the step
of a pipeline rank from recorded micro-batches.
"""
