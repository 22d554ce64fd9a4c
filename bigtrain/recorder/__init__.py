"""Records the last events of each rank, and makes a page from them when a run hangs or dies.

The page shows which rank waits for which. The package decides which events are recorded, how
torch's own record of exchanges is read, which rank is blamed for a hang, and the words and the file
of the page. It also records which ranks a run may lose, and how the remaining ranks exchange data.
"""
