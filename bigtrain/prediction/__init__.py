"""Predicts the peak memory of a rank, before anything is built, from runs on fake tensors.

This package records a step of a model or of a stage, or the sections of a model. It composes
sections into other models and stages, and reports predicted and measured memory.
"""
