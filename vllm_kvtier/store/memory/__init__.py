"""The pool: one sealed memory file, divided into slots; its limits, and its mapping in clients.

``pool_memory`` commits memory on a thread of its own. Does not import ``server`` or ``tiers``.
"""
