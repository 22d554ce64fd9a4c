"""What is done with tensors whatever they are for."""
