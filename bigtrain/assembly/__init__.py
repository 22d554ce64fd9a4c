"""Makes a plan from a job, and a runner from a plan.

The package chooses the mesh, the techniques and the batch of a plan. It decides in which order the
techniques are applied, when weights get their values, and whether the optimizer fits the strategy.
For a plan with a budget in bytes it chooses the recompute policy of each block, with the solver of
the package `activations`.
"""
