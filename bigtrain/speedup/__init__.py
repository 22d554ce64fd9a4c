"""Whether more ranks are faster, and from which batch or bandwidth on: `bigtrain speedup`.

Decides: what counts as computation and what as synchronisation; the inequality of synchronous SGD
and its solutions.
"""
