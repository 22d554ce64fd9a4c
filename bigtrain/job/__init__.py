"""One run as types: keys, defaults, YAML, words. No torch."""
