"""States that are kept for a conversation of 100 turns, beside those that vLLM's OffloadingConnector keeps.

vLLM's own scheduler plays the conversation with the scheduler side of each: its prefix cache is reset between turns, so
that each turn loads what was kept. The model does not run: answers are made up, and all copies succeed. Sizes are those
of Qwen3-Next-80B-A3B; its blocks of 544 tokens are 64 here, and its turns are as much shorter.

    python -m pytest -s tests/property/test_state_bytes.py
"""

import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from cache_groups import mamba
from source_fakes import load_context
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvtier.scheduler.offload.block_tables import BlockTables
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.scheduler.offload.store_jobs import STORED
from vllm_kvtier.store.protocol import HASH_BYTES
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

offloading = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.offloading.common")
keys = pytest.importorskip("vllm.v1.kv_offload.base")

pytestmark = pytest.mark.skipif(not granted(Feature.STATES), reason="the states of this vLLM are not stored")

BLOCK, STEP, TURNS = 64, 512, 100  # tokens, tokens
LAYERS, STATES = 12, 3  # of a group; groups of states, beside one of attention
# Gated delta net: 3 rows of a convolution of 8,192 channels, and 32 heads of 128 x 128 numbers, in bfloat16.
STATE_BYTES = LAYERS * (3 * 8192 + 32 * 128 * 128) * 2


class Ours(KVConnectorBase_V1, SupportsHMA):
    """What this package stores, and what it loads of that, without a store and workers."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.kept: set[tuple[int, bytes]] = set()
        self.requests, self.step = {}, 0

    def bind_gpu_block_pool(self, pool):
        groups = [(BLOCK, None), *[mamba(BLOCK)] * STATES]
        engine = load_context(groups, BLOCK, pool=BlockPool(pool), info={"step_tokens": STEP}).engine
        store = SimpleNamespace(limit=lambda: 1 << 50, instance="s", namespace_id=lambda fingerprint: b"n")
        self.geometry, self.offloader = engine.geometry, Offloader(engine, store, None, None, lambda block_hash: False)
        self.offloader.jobs = SimpleNamespace(ask=self.store, returned=deque(), cut_flights=None)
        self.tables = BlockTables(self.geometry.groups, BLOCK, lambda ids: None, lambda t: True)

    def store(self, batch, events, now):
        batch.make_items()
        self.kept |= {(item.group, item.hash) for item in batch.items}
        self.offloader.jobs.returned.append((batch.items, STORED))

    def get_num_new_matched_tokens(self, request, computed):
        self.requests[request.request_id] = SimpleNamespace(request=request)
        hashes = [bytes(each)[:HASH_BYTES] for each in request.block_hashes]
        found = 0
        for i, each in enumerate(hashes, 1):
            if (0, each) not in self.kept:
                break
            if all((g, each) in self.kept for g in range(1, 1 + STATES)):
                found = max(found, self.geometry.usable_tokens(i * BLOCK, request.num_tokens))
        return max(0, found - computed), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, output):
        self.step += 1
        self.offloader.begin_step(self.step, self.tables.begin_step(output, self.requests.get))
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        table = self.tables.remove(request.request_id)
        self.offloader.finished(self.requests.pop(request.request_id), table, block_ids, True)
        return False, None

    def has_pending_block_frees(self):
        return bool(self.offloader.jobs.returned)

    def states(self):
        return {entry for entry in self.kept if entry[0]}

    def start_load_kv(self, forward_context, **kwargs):
        raise AssertionError("no worker runs")

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


def make_engine(root, connector, module=None):
    extra = {} if module else {"cpu_bytes_to_use": 1 << 36, "blocks_per_chunk": 1}
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32", max_model_len=16384,
            hf_overrides={"max_position_embeddings": 16384},
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode="align"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=2, max_num_batched_tokens=STEP, max_model_len=16384, is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_connector_module_path=module, kv_role="kv_both", kv_connector_extra_config=extra
        ),
    )  # fmt: skip
    config.cache_config.num_gpu_blocks = 800
    state = MambaSpec(block_size=BLOCK, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    caches = KVCacheConfig(
        800, [], [KVCacheGroupSpec([f"layer {g}"], spec) for g, spec in enumerate([attention, *[state] * STATES])]
    )
    object.__setattr__(caches, "prefix_cache_retention_interval", 0)  # vLLM's default
    return Scheduler(
        vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK, hash_block_size=BLOCK, log_stats=False,
    )  # fmt: skip


def converse(scheduler):
    """(prompt tokens, tokens loaded) of each turn."""
    rng, history, told = random.Random(22), [], []
    for turn in range(TURNS):
        history += [rng.randrange(1000) for _ in range(rng.randrange(15, 55))]
        answer = [rng.randrange(1000) for _ in range(rng.randrange(15, 65))]
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(f"r{turn}", list(history), params, None, block_hasher=hasher)
        scheduler.add_request(request)
        loaded, steps = 0, 0
        while scheduler.requests or steps < 3 or scheduler.has_unfinished_requests():
            steps = 0 if scheduler.requests else steps + 1  # what an ended request leaves is stored
            output = scheduler.schedule()
            names = list(output.num_scheduled_tokens)
            sampled = [answer[:1] if _ends(request, output) else [] for _ in names]
            if sampled and sampled[0]:
                answer = answer[1:]
            loaded += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
            scheduler.update_from_output(output, _result(names, sampled, output.kv_connector_metadata))
        told.append((len(history), loaded))
        history = list(request.all_token_ids)
        assert scheduler.reset_prefix_cache(), "blocks are held"
    return told


def _ends(request, output):
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    name = request.request_id
    return computed[name] + output.num_scheduled_tokens[name] >= request.num_tokens


def _result(names, sampled, metadata):
    """A step's output; all copies that it began have ended."""
    transfers = None
    if isinstance(metadata, offloading.OffloadingConnectorMetadata):
        jobs = {**metadata.load_jobs, **metadata.store_jobs}
        worker = offloading.OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        transfers = KVConnectorOutput(
            finished_recving={job.req_id for job in metadata.load_jobs.values()}, kv_connector_worker_meta=worker
        )
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled,
        logprobs=None, prompt_logprobs_dict={}, pooler_output=[], kv_connector_output=transfers,
    )  # fmt: skip


def test_conversation_keeps_no_more_states_than_offloading_connector_and_hits_as_much(root):
    init_none_hash(sha256)
    ours = make_engine(root, "Ours", "test_state_bytes")
    theirs = make_engine(root, "OffloadingConnector")
    manager, kept = theirs.connector.connector_scheduler.manager, set()
    complete = manager.complete_store
    manager.complete_store = lambda stored, *more, **named: kept.update(stored) or complete(stored, *more, **named)
    mine, other = converse(ours), converse(theirs)
    counts = len(ours.connector.states()), len([key for key in kept if keys.get_offload_group_idx(key)])
    hits = [sum(loaded for _, loaded in turns) for turns in (mine, other)]
    for name, count, hit in zip(("vllm-kvtier", "OffloadingConnector"), counts, hits, strict=True):
        nbytes = count * STATE_BYTES / 1e9
        print(f"{name}: {count} states, {nbytes:.2f} GB; {hit} of {sum(n for n, _ in mine)} prompt tokens loaded")
    assert hits[0] >= hits[1] > 0.9 * sum(n for n, _ in mine)
    assert counts[0] <= counts[1]
