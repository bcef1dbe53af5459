"""Checkpoints that many ranks save and load together."""
