"""Recorded runs as stored: events, their tables, and the segments that hold them."""
