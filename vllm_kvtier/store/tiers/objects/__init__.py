"""The object tier (S3, Google Cloud Storage, Azure, a shared directory): one object a block, named by content."""
