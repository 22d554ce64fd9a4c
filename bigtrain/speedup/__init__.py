"""Whether more ranks pay, and what would make them: `bigtrain speedup`.

Decides: what counts as computing and what as synchronising; the inequality of synchronous SGD and
its solutions.
"""
