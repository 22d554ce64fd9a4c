"""Additions to an engine: an average of its weights, and its model in another engine's loss."""
