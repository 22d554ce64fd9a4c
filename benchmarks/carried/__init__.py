"""Training scripts as users write them, plain (`plain_NAME.py`) and carried over (`on_NAME.py`).

Each pair does what a public example of Accelerate or Lightning does, in our own words and on data
that every machine has. `benchmarks/carried_over.py` counts the lines that differ and compares the
numbers.
"""
