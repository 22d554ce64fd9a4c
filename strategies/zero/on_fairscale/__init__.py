"""ZeRO by fairscale's wrappers."""
