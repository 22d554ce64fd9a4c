"""Cutting any module into stages: where it may be cut, what the pieces cost, who runs what."""
