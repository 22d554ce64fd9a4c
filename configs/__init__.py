"""The presets: jobs, strategies and clusters as YAML."""
