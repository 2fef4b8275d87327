"""Routing policies: what a request is expected to cost at each engine. One file each; ``base`` has the contract."""

from vllm_kvtier.proxy.routing.policies.base import RoutingPolicy
from vllm_kvtier.proxy.routing.policies.kv_events import KVEventsPolicy
from vllm_kvtier.proxy.routing.policies.least_load import LeastLoad
from vllm_kvtier.proxy.routing.policies.prefix_hash import PrefixHash
from vllm_kvtier.proxy.routing.policies.round_robin import RoundRobin

POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy for policy in (PrefixHash, KVEventsPolicy, LeastLoad, RoundRobin)
}
