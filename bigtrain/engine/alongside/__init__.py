"""What goes alongside an engine's step: an average of its weights, its model in another loss."""
