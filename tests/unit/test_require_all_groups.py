"""Schedulers that themselves look up the hit of each group, as vLLM's do before 0.27, look up that of all groups; one
that cannot be made to is refused for models with recurrent states. ``test_vllm_connector_hits`` has vLLM's own."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched import scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.vllm_compat.hooks import local_hits
from vllm_kvtier.vllm_compat.probe import features

ATTENTION = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
STATE = MambaSpec(block_size=32, shapes=((2, 4),), dtypes=(torch.float32,))


class Hybrid:
    def find_longest_cache_hit_per_group(self):
        return "of attention"


def by_groups(self):
    if isinstance(self.coordinator, scheduler.HybridKVCacheCoordinator):
        return self.coordinator.find_longest_cache_hit_per_group()
    return "of all groups"


def by_groups_always(self):
    return self.coordinator.find_longest_cache_hit_per_group()


def groups(*specs):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.fixture
def schedule(monkeypatch):
    """Has vLLM's scheduler schedule so, and does it."""
    monkeypatch.setattr(features, "_results", {})
    monkeypatch.setattr(features, "_logged", set())
    monkeypatch.setattr(scheduler, "HybridKVCacheCoordinator", Hybrid, raising=False)

    def having(function):
        monkeypatch.setattr(scheduler.Scheduler, "schedule", function)
        return lambda: function(SimpleNamespace(coordinator=Hybrid()))

    return having


def test_scheduler_that_looks_up_single_groups_looks_up_all_of_them(schedule):
    scheduled = schedule(by_groups)
    assert scheduled() == "of attention"
    local_hits.require_all_groups(groups(ATTENTION, STATE))
    assert scheduled() == "of all groups"


def test_scheduler_that_looks_up_no_single_groups_is_left_as_it_is(schedule):
    schedule(lambda self: None)
    local_hits.require_all_groups(groups(ATTENTION, STATE))
    assert scheduler.HybridKVCacheCoordinator is Hybrid


def test_scheduler_that_cannot_be_changed_is_refused_for_models_with_states(schedule):
    schedule(by_groups_always)
    local_hits.require_all_groups(groups(ATTENTION, ATTENTION))
    with pytest.raises(UnsupportedVLLM, match="wrong answers of this model.*does not use HybridKVCacheCoordinator"):
        local_hits.require_all_groups(groups(ATTENTION, STATE))
