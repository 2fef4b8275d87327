"""Eviction policies by name. The default has the best hit rate on recorded conversations: benchmarks/policies.py.

On the server's reactor thread. Do not import ``server``, ``memory`` or ``tiers``.
"""

from collections.abc import Callable

from vllm_kvtier.store.eviction.aging import Aging
from vllm_kvtier.store.eviction.arc import Arc
from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.eviction.lru import Lru
from vllm_kvtier.store.eviction.s3fifo import S3Fifo

__all__ = ["DEFAULT_POLICY", "POLICIES", "Aging", "Arc", "Lru", "Policy", "S3Fifo"]

POLICIES: dict[str, Callable[[], Policy]] = {"aging": Aging, "arc": Arc, "lru": Lru, "s3fifo": S3Fifo}
DEFAULT_POLICY = "aging"
