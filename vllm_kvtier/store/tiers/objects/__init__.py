"""The object tier (S3): one object a block, named by content."""
