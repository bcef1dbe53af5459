"""Mirrors: a second store, to which every snapshot of the first one is uploaded in the background."""
