"""vLLM's own scheduler by priority: what a preempted request never computed does not stay in the prefix cache.

``LOW`` computes its prompt in chunks. ``high`` lacks a block in a step that has the next chunk of ``LOW`` already, and
whose blocks are in the prefix cache: the step goes without ``LOW``.
"""

import pytest
from support import Uncontained
from test_rollback import config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvtier.containment import Containment
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import engine_info
from vllm_kvtier.vllm_compat.hooks import rollback
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.probe.row import Feature

BLOCK, LOW = 4, [1] * 40
# Sizes of the groups' blocks, and their number: ``LOW`` fits, and both do not.
SIZES = {"one group": ((4,), 12), "two groups": ((8, 4), 18)}
CHUNKS = [(chunk, prompt) for chunk in (4, 8, 12) for prompt in (2, 3, 6, 9)]


def scheduler_of(root, sizes, blocks, chunk, policy="priority"):
    settings = config(root, False, "recompute", False)
    settings.kv_transfer_config = None
    settings.cache_config.block_size, settings.cache_config.num_gpu_blocks = BLOCK, blocks
    settings.scheduler_config.policy, settings.scheduler_config.max_num_batched_tokens = policy, 16
    settings.scheduler_config.long_prefill_token_threshold = chunk
    shape = dict(num_kv_heads=1, head_size=8, dtype=settings.model_config.dtype)
    specs = [KVCacheGroupSpec([f"layer{size}"], FullAttentionSpec(block_size=size, **shape)) for size in sizes]
    init_none_hash(sha256)
    made = Scheduler(
        vllm_config=settings, kv_cache_config=KVCacheConfig(blocks, [], specs),
        structured_output_manager=StructuredOutputManager(settings), block_size=max(sizes),
        hash_block_size=BLOCK, log_stats=False,
    )  # fmt: skip
    made.adaptive_long_prefill_threshold = False  # of some releases: chunks are a share of the step
    return made


class Life:
    """Runs both requests to their ends."""

    def __init__(self, scheduler, sizes, prompt):
        self.scheduler, self.sizes = scheduler, sizes
        self.pool, self.taken_back, self.preemptions = BlockPool(scheduler.kv_cache_manager.block_pool), 0, 0
        preempt = scheduler._preempt_request

        def checked(request, *args, **options):
            computed = request.num_computed_tokens
            self.taken_back += max(self.cached(request)) > computed
            preempt(request, *args, **options)
            self.preemptions += 1
            last = self.cached(request)
            assert max(last) <= computed, "blocks that were never computed are in the prefix cache"
            assert last[0] == computed // sizes[0] * sizes[0], "blocks that were computed are not"

        scheduler._preempt_request = checked
        self.add("low", LOW, 2, 5)
        self.step()
        self.add("high", [2] * prompt, 30, 0)
        for _ in range(200):
            if not scheduler.requests:
                return
            self.step()
        raise AssertionError("it hangs")

    def add(self, name, tokens, count, priority):
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(name, list(tokens), params, None, block_hasher=hasher, priority=priority))

    def cached(self, request):
        """By group, the tokens behind which its last block in the prefix cache ends."""
        ends = [[0] for _ in self.sizes]
        for g, size in enumerate(self.sizes):
            for end in range(size, len(request.block_hashes) * BLOCK + 1, size):
                if self.pool.cached_block(bytes(request.block_hashes[end // BLOCK - 1]), g):
                    ends[g].append(end)
        return [max(each) for each in ends]

    def step(self):
        step = self.scheduler.schedule()
        names = list(step.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [[7] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        self.scheduler.update_from_output(step, output)


@pytest.mark.parametrize("groups", sorted(SIZES))
def test_preemption_evicts_blocks_that_the_step_would_have_computed(root, groups):
    (sizes, blocks), taken_back = SIZES[groups], 0
    for chunk, prompt in CHUNKS:
        scheduler = scheduler_of(root, sizes, blocks, chunk)
        rollback.evict_uncomputed(scheduler, Uncontained())
        taken_back += Life(scheduler, sizes, prompt).taken_back
    assert taken_back > 0


def test_preemption_in_order_of_arrival_is_vllms_own(root):
    scheduler = scheduler_of(root, (4,), 12, 8, policy="fcfs")
    rollback.evict_uncomputed(scheduler, Uncontained())
    assert scheduler._preempt_request.__func__ is Scheduler._preempt_request
    life = Life(scheduler, (4,), 6)
    assert life.preemptions and not life.taken_back
    scheduler.policy = "a word"  # of a scheduler of the user's own
    rollback.evict_uncomputed(scheduler, Uncontained())


def test_preemption_goes_on_when_eviction_fails(root):
    scheduler, passive = scheduler_of(root, (4,), 12, 12), []
    contain = Containment(Counters())
    contain.on_limit = lambda: passive.append(True)
    rollback.evict_uncomputed(scheduler, contain)
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks = None
    with pytest.raises(AssertionError, match="never computed"):
        Life(scheduler, (4,), 6)
    assert passive and contain.errors == 2


def test_priorities_are_refused_where_preemptions_are_unknown(root, monkeypatch):
    settings = config(root, False, "recompute", False)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=settings.model_config.dtype)
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    monkeypatch.setattr(engine_info, "granted", lambda feature: feature is not Feature.PRIORITIES)
    assert "priorities" not in (engine_info.engine_info(settings, cache).unsupported or "")
    settings.scheduler_config.policy = "priority"
    assert "requests have priorities" in engine_info.engine_info(settings, cache).unsupported
