"""Compiled graphs as stored: written, found, trusted, limited in size."""
