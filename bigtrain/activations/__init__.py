"""What a block keeps for its backward pass."""
