"""The output of a run: the lines that it prints and the files that it writes.

The run's folder, metrics and memory files; log lines and tables; the text of a dry run; the style
of pictures.
"""
