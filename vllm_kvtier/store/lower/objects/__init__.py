"""An object store (S3): blocks as objects, named by content."""
