"""The files of other tools, one module a tool: what each key means, and what it contradicts."""
