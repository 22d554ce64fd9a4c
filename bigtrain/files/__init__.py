"""Reading files, folders and environment variables that others wrote: bounded and checked.

Decides what counts as a file, how large and how deeply nested its content may be, the form of
safetensors headers, and how a cache is read, replaced and discarded. Every reader raises the same
error, `errors.UnreadableError`.
"""
