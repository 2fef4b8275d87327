"""The node store: host memory that all engines of a node share. Imports neither vLLM nor torch.

``client`` is the engine's side of the connection, ``server`` the process ``python -m vllm_kvtier.store``.
"""
