"""Stages at work."""
