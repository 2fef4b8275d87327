"""The protocol between stores of different nodes: lookup, leases, and reads of their memory by NIXL.

Used by a store's tier ``nodes``, on its process's reactor thread. May import the store's protocol and types, never its
server or index.
"""
