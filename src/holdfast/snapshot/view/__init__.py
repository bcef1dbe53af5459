"""Reading parts of a snapshot without loading all of it."""
