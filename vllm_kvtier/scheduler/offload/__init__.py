"""Stores full blocks in the node store as requests fill them, and reports the store's blocks to vLLM as KV events.

On vLLM's scheduler thread. Does not import ``admin``.
"""
