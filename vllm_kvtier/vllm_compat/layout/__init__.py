"""vLLM's KV cache tensors as pages and fields.

On the worker's reactor, when the cache is registered. Imports ``wire``, ``worker.cache_view`` and the probe.
"""
