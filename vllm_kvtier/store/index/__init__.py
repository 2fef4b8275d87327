"""The slot of each block, its parents and leases, and why a block was removed. No sockets, no block contents.

On the server's reactor thread. Does not import ``server``, ``client`` or ``tiers``.
"""
