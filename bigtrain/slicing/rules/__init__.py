"""Rules for sliced tensors: what each function of torch does with them.

The rules decide which functions compute on a rank's slices, and what the ranks exchange for the
other functions.
"""
