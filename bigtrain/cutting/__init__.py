"""Any module as pipeline stages, without a captured graph and without a list of layers.

Where a cut is legal, and the reasons against it; what crosses it; the best partition; what a stage
computes; which rank has which stage; the check against the whole model.
"""
