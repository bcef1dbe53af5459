"""The plug-in for torch.distributed.checkpoint: its planners and collectives, over a repository."""
