"""Attention's own hits, under vLLM's own scheduler (``state_scheduler``): they are longer than those of all groups, and
only requests with a hand-off get them, up to the length that it is pulled behind."""

from types import SimpleNamespace

import pytest
from state_scheduler import BLOCK, Engine
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from vllm_kvtier.vllm_compat.hooks import local_hits
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

pytest.importorskip("vllm.model_executor.layers.mamba.checkpoint")
pytestmark = pytest.mark.skipif(not granted(Feature.LOCAL_HITS), reason="this vLLM looks for hits of all groups only")


@pytest.mark.parametrize("hash_block", [BLOCK, BLOCK // 2])
def test_vllm_attention_hits_are_longer_and_limited_to_handoffs(root, hash_block):
    init_none_hash(sha256)
    longest, longer = {}, 0
    for seed in range(3):
        engine = Engine(root, seed, False, 0, hash_block, False, False)
        manager = engine.scheduler.kv_cache_manager
        of_all = manager.get_computed_blocks
        local_hits.limit(manager, lambda request: longest.get(request.request_id, 0))
        for _ in range(120):
            engine.rng.choices([engine.new, engine.schedule, engine.outputs], [2, 10, 11])[0]()
        # As a connector that allows it, and asked as vLLM's scheduler asks.
        engine.scheduler.connector = SimpleNamespace(supports_divergent_local_hybrid_hits=True)
        for request in engine.known:
            blocks, tokens, _ = of_all(request)
            for most in (0, request.num_tokens, tokens, tokens - 1):
                longest[request.request_id] = most
                found, hit, _, diverged = engine.scheduler._get_local_prefix_cache_hit(request)
                assert tokens <= hit and (hit <= most or not diverged)
                if diverged:
                    assert len(found.blocks[0]) * BLOCK >= hit > tokens
                    longer += 1
                else:
                    assert (hit, found.blocks) == (tokens, blocks.blocks)
    assert longer > 5
