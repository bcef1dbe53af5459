"""Object stores in the cloud (S3, Google Cloud Storage, Azure Blob Storage), through obstore."""
