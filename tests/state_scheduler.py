"""vLLM's own scheduler with simulated workers, for models with recurrent states.

The workers move states as ``vllm.v1.worker.mamba_utils`` does: a step begins with the block of the request's last
token, and leaves its state in the block of the last token that it computes. A state is the prefix that it is of.
"""

import random
from collections import deque

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool

BLOCK, BLOCKS, STEP = 32, 60, 96  # tokens, blocks, tokens of a step


class Engine:
    """``retention``: vLLM's ``prefix_cache_retention_interval``. ``hash_block``: tokens of a hash. ``inner``: kernels
    save a state from within a step. ``transfer``: vLLM's KVTransferConfig."""

    def __init__(self, root, seed, asynchronous, retention, hash_block, alone, inner, transfer=None):
        self.rng, self.hash_block, self.lag = random.Random(seed), hash_block, int(asynchronous)
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode="align"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=6, max_num_batched_tokens=STEP, max_model_len=1024, is_encoder_decoder=False,
                async_scheduling=asynchronous,
            ),
            kv_transfer_config=transfer,
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = BLOCKS
        checkpoint = dict(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=8) if inner else {}
        state = MambaSpec(
            block_size=BLOCK, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align", **checkpoint
        )
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [state] if alone else [attention, state, state]
        self.states = [g for g, spec in enumerate(groups) if spec is state]
        caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([f"layer {g}"], spec) for g, spec in enumerate(groups)])
        object.__setattr__(caches, "prefix_cache_retention_interval", retention)
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, hash_block_size=hash_block, log_stats=False,
        )  # fmt: skip
        self.state, self.inner, self.saved = state, inner, 0
        self.pool = BlockPool(self.scheduler.kv_cache_manager.block_pool)
        self.plans, self.tables, self.held = {}, {}, {}  # by request; by block: the prefix of its state
        self.steps, self.made = deque(), 0
        self.known = []  # requests whose hashes are looked up, long after they ended
        self.checked = set()

    def new(self):
        rng = self.rng
        base = self.plans[rng.choice(list(self.plans))] if self.plans and rng.random() < 0.6 else []
        prompt = base[: rng.randrange(len(base))] if base else []
        prompt = prompt + [rng.randrange(9) for _ in range(rng.randrange(1, 5 * BLOCK))]
        answer = [rng.randrange(9) for _ in range(1 if self.is_prefill(len(prompt)) else rng.randrange(1, 3 * BLOCK))]
        self.made += 1
        name = f"r{self.made}"
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True, temperature=0.0)
        params.extra_args = {"kv_transfer_params": {"do_remote_decode": True}} if len(answer) == 1 else None
        params.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(self.hash_block, sha256)
        request = Request(name, list(prompt), params, None, block_hasher=hasher)
        self.plans[name] = prompt + answer
        self.known.append(request)
        self.add(request)

    def is_prefill(self, prompt):
        """Whether the next request is a prefill for another engine."""
        return False

    def add(self, request):
        self.scheduler.add_request(request)

    def schedule(self):
        output = self.scheduler.schedule()
        self.forward(output)
        self.steps.append(output)
        self.check()

    def forward(self, output):
        for copy in getattr(output, "kv_cache_block_copies", None) or ():  # vLLM 0.25 has none
            self.held[copy.dst_block_id] = self.held.get(copy.src_block_id)
        computed = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, tokens in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[name] = tokens
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(ids) for ids in blocks]
            else:
                for ids, more in zip(self.tables[name], blocks or (), strict=False):
                    ids += more
        for name, tokens in output.num_scheduled_tokens.items():
            first, last = computed[name], computed[name] + tokens
            for g in self.states:
                ids = self.tables[name][g]
                if first:
                    state = self.held.get(ids[(first - 1) // BLOCK])
                    assert state == self.plans[name][:first], "vLLM goes on with another"
                self.held[ids[(last - 1) // BLOCK]] = self.plans[name][:last]
                if self.inner:
                    self.save_inner_state(name, g, first, last)

    def save_inner_state(self, name, g, first, last):
        align = self.scheduler.kv_cache_manager.coordinator.single_type_managers[g].cache_hit_alignment_tokens
        alignment = self.state.prefill_checkpoint_alignment
        ([offset], [column]) = _checkpoint().compute_mamba_prefill_checkpoints(
            [last], [last - first], self.hash_block, BLOCK, alignment, False, align
        )
        if offset and self.tables[name][g][column]:
            self.held[self.tables[name][g][column]] = self.plans[name][: first + offset]
            self.saved += 1

    def check(self):
        for request in self.known:
            per = BLOCK // self.hash_block
            for i, block_hash in enumerate(request.block_hashes[per - 1 :: per]):
                for g in self.states:
                    if block := self.pool.cached_block(bytes(block_hash), g):
                        prefix = self.plans[request.request_id][: (i + 1) * BLOCK]
                        assert self.held[block] == prefix, f"block {i} of {request.request_id}"
                        self.checked.add(tuple(prefix))

    def outputs(self):
        if len(self.steps) <= self.lag and self.rng.random() < 0.7:
            return
        output = self.steps.popleft() if self.steps else None
        if output is None:
            return
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            tokens = [] if request is None else self.plans[name][request.num_tokens :][:1]
            ends = request is not None and self.ends(output, name) >= request.num_tokens
            sampled.append(tokens if ends else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled,
                logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            ),
        )  # fmt: skip

    def ends(self, output, name):
        """Tokens of the request that were computed when the step ran."""
        at = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        at.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return at[name] + output.num_scheduled_tokens[name]

    def abort(self):
        if self.scheduler.requests:
            name = self.rng.choice(list(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self):
        self.scheduler.reset_prefix_cache()


def _checkpoint():
    from vllm.model_executor.layers.mamba import checkpoint

    return checkpoint
