"""Memory as data: the lifetime and the kind of each tensor storage; measured and limited.

Kinds of memory and the peak; tracking of tensors, and the peak of the process; `memory.cap` and
which errors mean out of memory; the free memory of the host and the free space of a disk.
"""
