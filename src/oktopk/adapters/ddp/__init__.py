"""DistributedDataParallel: attach, the handle, the communication thread."""
