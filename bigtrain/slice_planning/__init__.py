"""Which tensors of any model can lie in slices over the ranks of the tp axis, and which do.

What is read off a forward pass of each dim; which slices go together, and what they send;
the best choice among them; how slices are written as lines.
"""
