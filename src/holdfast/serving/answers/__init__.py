"""What the API answers: snapshots, leaves, tensors, differences, each computed by functions that read a repository."""
