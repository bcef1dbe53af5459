"""Looking into a snapshot without loading all of it."""
