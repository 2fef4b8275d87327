"""What storing recurrent states rests on, under vLLM's own scheduler (``state_scheduler``): a block that its prefix
cache has under the hash of a whole block holds the state behind exactly that block's last token, once the step ran.
"""

import pytest
from state_scheduler import BLOCK, Engine
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

pytest.importorskip("vllm.model_executor.layers.mamba.checkpoint")
pytestmark = pytest.mark.skipif(not granted(Feature.STATES), reason="the states of this vLLM are not stored")


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("retention", "hash_block"), [(0, BLOCK), (None, BLOCK), (2 * BLOCK, BLOCK), (0, BLOCK // 2)])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_vllm_prefix_cache_names_states_behind_whole_blocks(root, inner, asynchronous, retention, hash_block, alone):
    if alone and hash_block != BLOCK:
        pytest.skip("a single group's hashes are of its blocks")
    init_none_hash(sha256)
    found = saved = 0
    for seed in range(8):
        engine = Engine(root, seed, asynchronous, retention, hash_block, alone, inner)
        events = {engine.new: 2, engine.schedule: 10, engine.outputs: 11, engine.abort: 0.3, engine.reset: 0.1}
        for _ in range(300):
            engine.rng.choices(list(events), list(events.values()))[0]()
        found, saved = found + len(engine.checked), saved + engine.saved
    assert found > 60 and bool(saved) == inner
