"""The disk tier: one file of slots, and a journal of what is in them.

``tier`` decides, on the server's reactor thread; what ``process`` imports runs in the tier's process. Imports no other
tier.
"""
