"""Measures and limits memory: the lifetime and the kind of each tensor storage, and the peaks.

The package also enforces `memory.cap`, recognises errors that mean out of memory, and reads the
free memory of the host and the free space of a disk.
"""
