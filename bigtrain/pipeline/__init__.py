"""Stages at work, on the schedules of torch.distributed.pipelining or one at a time.

A pipeline's step; sends and receives; tied parameters; state of all stages for a checkpoint;
deferred BatchNorm; several stages in one process.
"""
