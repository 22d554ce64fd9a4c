"""What a run prints, and the files that it leaves.

The run's folder, metrics and memory files; log lines and tables; the text of a dry run; the look
of pictures.
"""
