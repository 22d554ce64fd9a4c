"""Tensors of which each rank of the tp axis holds slices, while a model's code sees whole tensors.

Decides: how a tensor is divided over the ranks; what each function of torch does with slices; which
collectives run where slices meet whole tensors; the state and gradient norm of a sliced model.
"""
