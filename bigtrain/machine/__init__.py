"""The speed and the size of devices, nodes and links, from a cluster file or measured.

The package reads cluster files, computes the seconds of a collective, and measures and caches the
rates of this machine. It also decides the safety margin of forecasts, and which versions of
DeepSpeed and fairscale are known to work.
"""
