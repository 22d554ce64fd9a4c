"""Which tensors of a model are sliced over the ranks of the tp axis.

Decides: what is read from a forward pass about each dim; which dims must be sliced together, and
how many bytes the ranks then exchange; the best choice; how slices are written as text.
"""
