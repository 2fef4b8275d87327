"""Hooks into vLLM's scheduler: its idle loop, its block pool, a lock, and rollback of a request.

On vLLM's scheduler thread. The only package that patches vLLM.
"""
