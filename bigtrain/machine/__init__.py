"""The speed and size of devices, nodes and links: from a cluster file, or measured here.

Decides: the figures of a cluster; the seconds of a collective; how rates are measured and cached;
the safety margin of forecasts; which versions of DeepSpeed and fairscale are known to work.
"""
