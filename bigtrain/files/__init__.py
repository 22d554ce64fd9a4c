"""How files, folders and variables that others have written come in: bounded, checked, or refused.

Decides: what counts as a file; how large, how deep and how often repeated what is read may be; the
form of safetensors' headers; how a cache is read, replaced and thrown away; the one error of all
of them, `errors.UnreadableError`.
"""
