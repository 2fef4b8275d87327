"""Where a request's KV can come from, one file a source, and the jobs that load it. ``base`` has the contract.

On vLLM's scheduler thread. Answers arrive on the engine's reactor and are polled here. Does not import ``admin``.
"""
