"""The techniques, one module or package each, with their refusals, forecasts and traffic.

Data parallelism, ZeRO on three engines, pipelines, activation checkpointing, offload,
accumulation: each with its options. The private names that are used of DeepSpeed and fairscale, and
the versions that have them.
"""
