"""One step for each global batch, and what surrounds it."""
