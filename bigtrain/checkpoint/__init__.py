"""One checkpoint format for every strategy: whole tensors under plain names, hashed in pieces.

Decides the names and headers of the files; which rank writes which tensor, and the bytes that ranks
send each other for it; the manifest and the checks for damage; reading of slices; which checkpoints
are kept; random states; conversion from other libraries' checkpoints, and the parts of a pickle
that are read.
"""
