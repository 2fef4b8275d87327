"""Leases: what other engines hold of this engine's blocks, and what this engine holds of theirs.

``lease_server`` and ``lease_client`` own sockets on the engine's reactor; tables are read and written under their
locks. Pins and frees of vLLM's blocks happen on vLLM's scheduler thread only. Does not import ``admin``.
"""
