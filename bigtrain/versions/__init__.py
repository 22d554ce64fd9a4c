"""Differences between the supported versions of torch.

Decides: which version has which feature, and what replaces a feature that a version lacks.
"""
