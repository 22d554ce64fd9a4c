"""Cut any module into pipeline stages, without a captured graph and without a list of layers.

The package finds the legal cuts and the reasons against the others, the tensors that cross a cut,
and the best partition. It runs a stage's part of the forward pass, assigns stages to ranks, and
compares the stages with the whole model.
"""
