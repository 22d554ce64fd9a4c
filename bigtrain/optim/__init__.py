"""Optimizers, put to whole, sharded, stored or released parameters."""
