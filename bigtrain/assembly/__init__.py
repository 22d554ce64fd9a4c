"""From a job to a plan, and from a plan to a live runner.

Mesh, techniques and batch of a plan; why each step of composition stands where it does; when
weights get values; whether optimizer and strategy fit; what a recompute budget in bytes means for
a plan (the choice for each block itself is made in `activations`).
"""
