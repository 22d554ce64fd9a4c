"""What a plan holds and sends, as data.

Profile, forecast and traffic of a rank; what states take at the least; a pipeline rank's step
replayed from recorded micro-batches.
"""
