"""What each rank did last, and one page that says who waits for whom when a run hangs or dies.

The ring of events and who writes into it; how torch's own record of exchanges is read; which rank
counts as the one that never came; the words and the file of the page; which ranks a run may lose,
and how those that are left exchange.
"""
