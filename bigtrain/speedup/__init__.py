"""Find out whether more ranks are faster, and from which batch or bandwidth: `bigtrain speedup`.

Decides which seconds of a step count as computation and which as synchronisation; the inequality of
synchronous SGD and its solutions.
"""
