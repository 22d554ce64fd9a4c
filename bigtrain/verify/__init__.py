"""Proof on the user's own model: a strategy computes what one process computes."""
