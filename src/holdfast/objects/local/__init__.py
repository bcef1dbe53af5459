"""The object store in a directory of a local or network filesystem."""
