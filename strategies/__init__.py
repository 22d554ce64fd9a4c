"""The techniques: a module or package for each, with its options, checks, forecasts and traffic.

Decides: the options of data parallelism, ZeRO on three engines, pipelines, tensor parallelism,
activation checkpointing, offload and accumulation; the plans that each technique refuses; which
private names of DeepSpeed and fairscale are used, and which versions have them.
"""
