"""Memory as data: which tensor storage is alive when, and of which kind; measured and limited.

Kinds of memory and the peak; tracking of tensors, and the process's own peak; `memory.cap` and
what counts as out of memory; how much of the host and of a disk is free.
"""
