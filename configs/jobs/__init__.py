"""Jobs by name: each file is one whole run."""
