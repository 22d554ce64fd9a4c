"""What devices, nodes and links can do: from a cluster file, or measured by `bigtrain doctor`.

Figures of a cluster; how long a collective takes; rates measured here and where they are kept;
what this machine lacks; whether an installed DeepSpeed or fairscale is a version that works.
"""
