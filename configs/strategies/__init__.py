"""Strategies by name: what `--strategy NAME` merges over a job."""
