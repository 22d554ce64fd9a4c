"""ZeRO on torch's DistributedDataParallel and fully_shard."""
