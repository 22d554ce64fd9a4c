"""One format for the state of every strategy: whole tensors under plain names, hashed by pieces.

Names and headers of the files; which rank writes which tensor, and what goes between the ranks;
the manifest, and what counts as damage; reading by slices; which checkpoints stay; random states;
what is taken over from other libraries, and what of a pickle is read.
"""
