"""The techniques, one module each."""
