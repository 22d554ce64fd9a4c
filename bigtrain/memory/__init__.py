"""What memory is called, how it is measured, what is free."""
