"""The interface of strategies, and the training loop of plans whose techniques have no own loop.

The package has the interface (`Strategy`, `Plan`, `Assembly`, `Runner`), the variants of a
technique for the planner, the order in which techniques are applied, the plain loop (forward,
backward, clipping, update), the averaging of gradients over replicas, and the table of techniques.
"""
