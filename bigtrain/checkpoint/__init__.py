"""One format for the state of every strategy: whole tensors under plain names, hashed by pieces."""
