"""The disk tier: one file of slots, and a journal of what is in them."""
