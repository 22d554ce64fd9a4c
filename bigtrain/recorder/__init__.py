"""The last events of each rank, and one page that says who waits for whom when a run hangs or dies.

Decides: which events are recorded; how torch's own record of exchanges is read; which rank is named
as the one that never came; the words and the file of the page; which ranks a run may lose, and how
the remaining ones exchange.
"""
