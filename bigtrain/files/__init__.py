"""Read files, folders and environment variables that others wrote, with limits and checks.

This package decides which paths count as files, how large and how deeply nested their content may
be, and which safetensors headers are accepted. It also decides how a cache is read, replaced and
discarded. Every reader raises the same error, `errors.UnreadableError`.
"""
