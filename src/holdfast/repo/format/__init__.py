"""The format: how chunks, packs, manifests and records are encoded as bytes."""
