"""The object tier (S3, Google Cloud Storage, Azure, a shared directory): one object a block, named by content.

``tier`` decides, on the server's reactor thread; what ``process`` imports runs in the tier's process. Imports no other
tier.
"""
