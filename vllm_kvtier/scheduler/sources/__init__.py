"""Where a request's KV can come from, one file a source, and the jobs that load it. ``base`` has the contract.
``node_store`` is the connection of ``store_source``, and what else uses the node store.

On vLLM's scheduler thread. Answers arrive on the engine's reactor and are polled here. Does not import ``admin``.
"""
