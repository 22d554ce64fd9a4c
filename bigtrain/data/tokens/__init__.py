"""Text as a tokenizer's tokens: documents, answers, windows.

Decides: the formats of records; which tokens are answers; the file that caches tokens; how
documents fill windows; which masks a model gets.
"""
