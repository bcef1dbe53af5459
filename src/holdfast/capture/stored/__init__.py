"""Recorded runs as they are stored: events, their tables, and the segments that contain them."""
