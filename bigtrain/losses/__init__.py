"""A loss is a sum with a count."""
