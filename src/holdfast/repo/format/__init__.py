"""The format: how chunks, packs, manifests and records are laid out as bytes."""
