"""Eviction policies by name. The default is what wins on recorded conversations: benchmarks/policies.py."""

from collections.abc import Callable

from vllm_kvtier.store.policies.aging import Aging
from vllm_kvtier.store.policies.arc import Arc
from vllm_kvtier.store.policies.base import Policy
from vllm_kvtier.store.policies.lru import Lru
from vllm_kvtier.store.policies.s3fifo import S3Fifo

POLICIES: dict[str, Callable[[], Policy]] = {"aging": Aging, "arc": Arc, "lru": Lru, "s3fifo": S3Fifo}
DEFAULT_POLICY = "aging"
