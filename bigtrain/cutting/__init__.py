"""Any module as pipeline stages, without a captured graph and without a list of layers.

Where a cut is legal, and the reasons against it; the tensors that cross it; the best partition; the
part of the forward pass that a stage computes; the rank of each stage; the check against the whole
model.
"""
