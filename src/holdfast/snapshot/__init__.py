"""Snapshots of trees of state: save, load, load in place, and read parts."""
