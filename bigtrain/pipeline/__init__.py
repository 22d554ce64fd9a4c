"""Run stages, on the schedules of torch.distributed.pipelining or one micro-batch at a time.

A pipeline's step; passes of a stage; sends and receives; tied parameters; the state of all stages
for a checkpoint; deferred BatchNorm; several stages in one process.
"""
