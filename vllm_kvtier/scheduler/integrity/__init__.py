"""Only verified KV is used: which blocks have a checksum, synchronous loads, and the end of each load.

On vLLM's scheduler thread. Does not import ``leases``, ``offload`` or ``admin``.
"""
