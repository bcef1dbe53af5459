"""Checkpoints that all ranks of a job save and load together."""
