"""The store's process: connections, the directory of engines' caches, KV events, metrics.

One thread answers clients; metrics are served on threads of their own. It never reads what slots hold.
Does not import ``client``; ``python -m vllm_kvtier.store`` imports it.
"""
