"""Behind the content store: tensors gathered into batches, found again by name, and given their memory back."""
