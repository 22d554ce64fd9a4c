"""Explain a configuration of another tool, and find a better plan: `bigtrain explain`.

Decides: how the four kinds of files are distinguished; which key of DeepSpeed, Accelerate, axolotl
and TRL means which key of a job; which of their keys do nothing or contradict each other; when
another plan counts as better.
"""
