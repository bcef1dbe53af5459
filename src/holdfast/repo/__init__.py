"""The repository: chunks, packs, manifests and snapshots on top of any object store; knows bytes, not tensors."""
