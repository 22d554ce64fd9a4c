"""The output of a run: the lines that it prints and the files that it writes.

The package makes the run's folder, the files of metrics and of memory, log lines and tables. It
also contains the text of a dry run, `bigtrain check`, and the style of pictures.
"""
