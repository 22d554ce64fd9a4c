"""The files of other tools, one module per tool: the meaning and the faults of each key."""
