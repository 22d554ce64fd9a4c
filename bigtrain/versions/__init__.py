"""Versions of torch, where they differ.

Decides: which version has what; what stands in for what one lacks.
"""
