"""The techniques, one module or package each, with their refusals, forecasts and traffic.

Data parallelism, ZeRO on three engines, pipelines, activation checkpointing, offload,
accumulation: each with its options. All that is used of DeepSpeed's and fairscale's inside, and in
which versions.
"""
