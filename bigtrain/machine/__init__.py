"""Figures of devices and links, from a file or measured."""
