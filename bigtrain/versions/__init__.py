"""Versions of torch, where they differ.

Decides which version has which feature, and what replaces a feature that one lacks.
"""
