"""What a plan holds and sends, as data. Pure."""
