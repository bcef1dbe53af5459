"""Reads snapshots: plans which bytes to read, finds where they are stored, and verifies them."""
