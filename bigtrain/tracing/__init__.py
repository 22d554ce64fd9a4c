"""A forward pass on fake tensors, recorded.

A trace has calls of modules, tensors with their origins and uses, in-place writes, state of modules
and costs of operations. Also here: the parameters that the loss does not reach, and modules that
only some passes call.
"""
