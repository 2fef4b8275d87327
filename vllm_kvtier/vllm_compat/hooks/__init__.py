"""Hooks into vLLM's scheduler (its idle loop, its block pool, a lock, rollback of a request) and its configuration.

On vLLM's scheduler thread; ``mm_embeddings`` and ``replaced_connector`` on the thread that makes the configuration. The
only package that patches vLLM.
"""
