"""Records the last events of each rank, and makes a page from them when a run hangs or dies.

The page shows which rank waits for which. The package decides which events are recorded, how
torch's own record of exchanges is read, which rank is blamed for a hang, and the words and the file
of the page. It also keeps the list of ranks that a run may lose, and has exchanges that work after
such a loss.
"""
