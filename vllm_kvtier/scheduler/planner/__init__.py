"""Load or recompute: the cost model, and the planner that decides by it.

On vLLM's scheduler thread. Does not import ``sources``, ``leases``, ``offload`` or ``admin``.
"""
