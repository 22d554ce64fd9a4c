"""Additions to an engine: an average of its weights, and its model inside another loss."""
