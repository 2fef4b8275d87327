"""Loads from the stores of other nodes, read by NIXL into a staging ring and copied into the cache.

On the worker's reactor; launches on the model runner's thread. Does not import ``worker.peer_fetch``.
"""
