"""Who does what in which order in a pipeline. Pure."""
