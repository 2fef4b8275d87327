"""The disk: one file of slots, a journal of what is in them."""
