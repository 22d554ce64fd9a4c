"""From a job to a plan, and from a plan to a live runner.

Mesh, techniques and batch of a plan; the order of composition, with reasons; when weights get
values; whether optimizer and strategy fit; the recompute policies of a plan with a budget in bytes
(`activations` solves the choice for each block).
"""
