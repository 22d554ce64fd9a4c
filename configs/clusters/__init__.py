"""Clusters by name: each file has the figures of one kind of node and its links."""
