"""The plug-in for torch.distributed.checkpoint (DCP): its planners and collectives, with a repository as storage."""
