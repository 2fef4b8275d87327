"""The only package that knows vLLM's versions: which are supported, and what differs between them.

On the thread of vLLM that calls. Imports ``wire``, ``jobs``, ``worker.cache_view`` and vLLM; never ``scheduler`` or a
store.
"""
