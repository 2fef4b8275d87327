"""Stores of an engine whose kernels save a prompt's last state within a block, under vLLM's own scheduler."""

from collections import deque
from types import SimpleNamespace

import pytest
from source_fakes import load_context
from state_scheduler import BLOCK, Engine
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from vllm_kvtier.cache_kinds import CacheGroup, get
from vllm_kvtier.scheduler.offload.block_tables import BlockTables
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.scheduler.offload.store_jobs import STORED
from vllm_kvtier.store.protocol import HASH_BYTES
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

pytest.importorskip("vllm.model_executor.layers.mamba.checkpoint")
pytestmark = pytest.mark.skipif(not granted(Feature.STATES), reason="the states of this vLLM are not stored")


class Storing(Engine):
    """One request at a time; a store that takes all that it is offered."""

    def __init__(self, root, seed, retention, hash_block):
        super().__init__(root, seed, False, retention, hash_block, False, True)
        self.counters, self.kept, self.step, self.tracked = Counters(), set(), 0, {}
        groups = [CacheGroup(BLOCK, get(kind)) for kind in ("full", "mamba", "mamba")]
        info = {"step_tokens": 96, "states_within_steps": True}
        load = load_context(groups, hash_block, pool=self.pool, counters=self.counters, info=info)
        store = SimpleNamespace(limit=lambda: 1 << 50, instance="s", namespace_id=lambda fingerprint: b"n")
        self.offloader = Offloader(load.engine, store, None, None, lambda block_hash: False)
        self.offloader.jobs = SimpleNamespace(ask=self.store, returned=deque(), cut_flights=None)
        self.tables_of_ours = BlockTables(groups, hash_block, lambda ids: None, lambda state: True)
        after = self.scheduler._update_after_schedule
        self.scheduler._update_after_schedule = lambda output: (self.begin_step(output), after(output))[1]
        self.scheduler._connector_finished = self.ended

    def store(self, batch, events, now):
        batch.make_items()
        self.kept |= {(item.group, item.hash) for item in batch.items}
        self.offloader.jobs.returned.append((batch.items, STORED))

    def add(self, request):
        self.tracked[request.request_id] = SimpleNamespace(request=request)
        super().add(request)

    def begin_step(self, output):
        self.step += 1
        self.offloader.begin_step(self.step, self.tables_of_ours.begin_step(output, self.tracked.get))

    def ended(self, request):
        tokens = request.num_computed_tokens
        ids = self.scheduler.kv_cache_manager.get_block_ids_for_computed_tokens(request.request_id, tokens)
        self.offloader.finished(
            SimpleNamespace(request=request), self.tables_of_ours.remove(request.request_id), ids, True
        )
        return False, None

    def check(self):
        """Under the hash of a whole block vLLM may have another state here: see ``states_within_blocks``."""
        if self.hash_block == BLOCK:
            super().check()

    def run(self):
        self.new()
        request = self.known[-1]
        while request.request_id in self.scheduler.requests:
            self.schedule()
            self.outputs()
        self.offloader.drain()
        return request

    def stored(self, request, group):
        """Whether the store has the group's block, by place."""
        per = BLOCK // self.hash_block
        return [(group, bytes(each)[:HASH_BYTES]) in self.kept for each in request.block_hashes[per - 1 :: per]]


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("hash_block", [BLOCK, BLOCK // 4])
def test_offloader_stores_nothing_where_vllm_keeps_states_within_blocks(root, hash_block, retention):
    """Hardly a prompt could be loaded, because a state was missing. Its attention layers' blocks were stored in full,
    without a log or a count."""
    init_none_hash(sha256)
    usable = whole = skipped = 0
    for seed in range(4):
        engine = Storing(root, seed, retention, hash_block)
        for _ in range(30):
            request = engine.run()
            states = zip(*[engine.stored(request, g) for g in (0, *engine.states)], strict=True)
            usable += max([i for i, each in enumerate(states, 1) if all(each)], default=0)
            whole += (request.num_prompt_tokens - 1) // BLOCK
        skipped += engine.counters.take().get("stores_skipped|state_not_kept", 0)
        assert bool(engine.kept) == (hash_block == BLOCK) and not engine.offloader.pinned
    assert (usable >= whole and not skipped) if hash_block == BLOCK else skipped >= whole
