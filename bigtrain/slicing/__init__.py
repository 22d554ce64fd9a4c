"""Tensors of which each rank of the tp axis holds slices, and which a model's code sees as whole.

How a tensor lies on the ranks; what each function of torch does on slices; what is
exchanged where slices meet whole tensors; the state and the norm of a sliced model.
"""
