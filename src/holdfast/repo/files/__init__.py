"""Directories of files as snapshots, and back."""
