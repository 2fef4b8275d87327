"""The protocol between stores of different nodes: lookup, leases, and reads of their memory by NIXL.

Used by a store's tier ``nodes`` and by engines that read other nodes' stores themselves. Runs on the caller's reactor
thread. May import the store's protocol and types, never its server or index.
"""
