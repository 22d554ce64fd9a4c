"""Run stages, on the schedules of torch.distributed.pipelining or one micro-batch at a time.

The package has the runner of a pipeline, the passes of a stage, sends and receives, tied
parameters, deferred BatchNorm, and all stages in one process.
"""
