"""Mirrors: a second store that receives every snapshot of the first one, behind the training."""
