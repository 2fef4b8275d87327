"""The connector's scheduler side: which KV a request loads, from where, and which blocks other engines may read.

``wiring`` makes its parts, ``connector_scheduler`` has vLLM's calls. Runs in the engine core process, on vLLM's
scheduler thread; ``leases`` also on the engine's reactor. Imports ``jobs``, ``store``'s client and protocol,
``vllm_compat``, ``wire``, ``codecs`` and ``telemetry``; never ``worker`` or ``connector``.
"""
