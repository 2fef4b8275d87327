"""Engines with context parallelism: vLLM's own scheduler and block tables, ranks that fill caches by vLLM's own rule
for slots, a real node store, and hand-offs between two engines. Without a model, and without the collectives of DCP: no
attention backend of CPUs has it. With real engines: ``tests/engines/test_gpu_context_parallel.py``."""

import copy
import time

import numpy as np
import pytest
from context_shards import LAYERS, WIDTH, Shape, ShardedRank
from decode_harness import Transport
from store_process import Store
from store_support import map_pool
from support import eventually
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.vllm_compat.worker_info import shards
from vllm_kvtier.wire.link import LinkPlace
from vllm_kvtier.worker import connector_worker
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory

BLOCKS, STEP = 96, 24  # blocks of a cache; tokens of a step, not a multiple of blocks
SIZES = {"interleave 1": Shape(2, 2, 1, 8), "interleave 2": Shape(4, 2, 2, 8), "block": Shape(4, 4, 8, 8)}


class Engine:
    """``pcp``: ranks that repeat all KV. ``described``: the shards that ranks say they are, if not those they are."""

    def __init__(self, root, monkeypatch, shape, store="off", pcp=1, described=None):
        options = {
            "store": store, "model_fingerprint": "context", "load_policy": "always", "pull_threshold": 0,
            "transfer_timeout": 10.0,
        }  # fmt: skip
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
            ),
            cache_config=CacheConfig(block_size=shape.block, enable_prefix_caching=True),
            parallel_config=ParallelConfig(),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=STEP, max_model_len=1024, is_encoder_decoder=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector", kv_connector_module_path="vllm_kvtier.connector", kv_role="kv_both",
                kv_connector_extra_config=options,
            ),
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = BLOCKS
        parallel, self.shape = config.parallel_config, shape
        parallel.tensor_parallel_size, parallel.decode_context_parallel_size = shape.tp, shape.dcp
        parallel.prefill_context_parallel_size = pcp
        parallel.cp_kv_cache_interleave_size = shape.interleave
        names = [f"l{n}" for n in range(LAYERS)]
        caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, shape.spec)])
        block, hash_block = resolve_kv_cache_block_sizes(caches, config)
        assert block == hash_block == shape.virtual
        self.core = EngineCore.__new__(EngineCore)
        self.scheduler = self.core.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
            block_size=block, hash_block_size=hash_block, log_stats=False,
        )  # fmt: skip
        self.connector, self.count, self.blocks = self.scheduler.connector, 0, {}
        self.workers, self.ranks = [], []
        for rank in range(pcp * shape.tp):
            worker = KVTierConnector(config, KVConnectorRole.WORKER, caches)
            position = rank % shape.tp
            made = ShardedRank(shape, position, BLOCKS, described and described[position])
            self.workers.append(worker)
            self.ranks.append(made)
            if worker._info.unsupported:
                continue
            worker._worker = KVTierConnectorWorker(
                rank, f"{worker._link} {rank}", LinkPlace(worker._link), [], worker.containment
            )
            kinds = [group.kind for group in made.view.groups]
            own = shape.config
            own.parallel_config.prefill_context_parallel_size = pcp
            shard = described[position] if described else made.shard
            parts = shards(own, kinds, rank, shard)
            worker._worker.register(
                CacheSetup(
                    lambda made=made: made.view, lambda view: CacheMemory(view, False),
                    lambda view, parts=parts: parts, lambda view, made=made: made.rank.heads,
                )
            )  # fmt: skip
        self.outputs = KVOutputAggregator(len(self.workers))
        self.patch = monkeypatch

    def ready(self):
        """With a store, or without."""
        self.ask(0, 3)
        ours = self.connector._scheduler
        if ours._store is not None:
            eventually(lambda: self.step() and ours._store.limit(), 60, "the store serves, and all ranks reach it")
        eventually(lambda: self.step() and len(ours._identity.ranks) == len(self.workers), 60, "all ranks reported")

    def content(self, prompt):
        sizes = (LAYERS, 1024, max(1, self.shape.kv_heads), WIDTH)
        return np.random.default_rng(prompt).integers(0, 256, sizes, dtype=np.uint8)

    def step(self):
        output = self.scheduler.schedule()
        names, results = list(output.num_scheduled_tokens), []
        for worker, rank in zip(self.workers, self.ranks, strict=True):
            self.patch.setattr(runner, "get_kv_transfer_group", lambda worker=worker: worker)
            with runner.KVConnectorModelRunnerMixin._get_kv_connector_output(copy.deepcopy(output)) as kv:
                for name, count in output.num_scheduled_tokens.items():
                    request = self.scheduler.requests[name]
                    end = request.num_computed_tokens  # vLLM has added those of this step already
                    [blocks] = self.blocks[name] = self.scheduler.kv_cache_manager.get_block_ids(name)
                    rank.write(blocks, self.content(request.prompt_token_ids[0])[:, :end], end - count)
            results.append(
                ModelRunnerOutput(
                    req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
                    sampled_token_ids=[
                        [7] if self.scheduler.requests[name].num_computed_tokens
                        >= self.scheduler.requests[name].num_tokens else [] for name in names
                    ],
                    logprobs=None, prompt_logprobs_dict={}, pooler_output=[], kv_connector_output=kv,
                )
            )  # fmt: skip
        time.sleep(1e-3)
        self.finished = self.scheduler.update_from_output(output, self.outputs.aggregate(results))
        return output

    def ask(self, prompt, length, generated=3, **params):
        """A request whose KV is right on each rank when it ends. Returns the tokens of its prompt that this engine did
        not compute, and its ``kv_transfer_params``."""
        self.count += 1
        sampling = SamplingParams(
            max_tokens=generated, ignore_eos=True, temperature=0.0, extra_args={"kv_transfer_params": params} if params
            else None,
        )  # fmt: skip
        sampling.update_from_generation_config({}, 1)
        tokens = [prompt, *range(1, length)]
        hasher = get_request_block_hasher(self.shape.virtual, sha256)
        request = Request(f"r{self.count}", tokens, sampling, None, block_hasher=hasher)
        self.core.add_request(request)
        until, computed, answer = time.monotonic() + 60, 0, None
        while self.scheduler.has_unfinished_requests():
            assert time.monotonic() < until
            output = self.step()
            computed += output.num_scheduled_tokens.get(request.request_id, 0)
            for outputs in self.finished.values():
                answer = next((o.kv_transfer_params for o in outputs.outputs if o.kv_transfer_params), answer)
        for number, rank in enumerate(self.ranks):
            wrong = rank.wrong(self.blocks[request.request_id][0], self.content(prompt)[:, :length])
            assert not len(wrong), f"rank {number}, tokens {wrong}"
        return length + generated - 1 - computed, answer

    def forget(self):
        """vLLM's prefix cache, and all bytes."""
        eventually(lambda: self.step() and self.scheduler.reset_prefix_cache(), 30)
        for cache in (cache for rank in self.ranks for cache in rank.caches):
            cache.random_(0, 256)

    def end(self):
        self.connector.shutdown()
        for worker in self.workers:
            worker.shutdown()


@pytest.fixture
def make(root, run_dir, monkeypatch):
    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    monkeypatch.setattr(connector_worker, "NixlTransport", Transport)
    monkeypatch.setattr(runner, "get_forward_context", lambda: None)
    init_none_hash(sha256)
    made = []

    def engine(shape, **more):
        made.append(Engine(root, monkeypatch, shape, **more))
        if not made[-1].connector._info.unsupported:
            made[-1].ready()
        return made[-1]

    yield engine
    for each in made:
        each.end()


@pytest.fixture
def store(run_dir):
    made = Store(run_dir)
    made.start("--size=16MiB")
    yield made
    made.kill()


def all_stored(engine, store):
    eventually(lambda: (engine.step(), not store.counts().index.reservations)[1], 30, "all is stored")


def whole(shape, length):
    """As an engine with blocks of so many tokens: whole blocks, but the last token; fewer than 16 are not loaded."""
    tokens = min(length // shape.virtual * shape.virtual, length - 1)
    return tokens if tokens >= 16 else 0


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_each_rank_stores_and_loads_its_tokens_of_each_block(make, store, name, seed):
    shape = SIZES[name]
    engine, rng = make(shape, store=store.path), np.random.default_rng(seed)
    lengths = [shape.virtual - 1, shape.virtual, shape.virtual + 1, *rng.integers(2, 7 * shape.virtual, 4).tolist()]
    for prompt, length in enumerate(lengths, 10):
        assert engine.ask(prompt, length)[0] == 0
    all_stored(engine, store)
    engine.forget()
    for prompt, length in enumerate(lengths, 10):
        assert engine.ask(prompt, length)[0] == whole(shape, length), length
        longer = length + int(rng.integers(1, 2 * shape.virtual))
        assert engine.ask(prompt, longer)[0] >= whole(shape, length), "from the prefix cache of vLLM"


@pytest.mark.parametrize("other", [
    {"shape": Shape(2, 2, 8, 8)}, {"shape": Shape(2, 1, 1, 16)},
    {"shape": Shape(2, 2, 1, 8), "described": [Shape(2, 2, 1, 8).shard(1), Shape(2, 2, 1, 8).shard(0)]},
], ids=["other runs", "without DCP", "exchanged ranks"])  # fmt: skip
def test_engines_with_other_tokens_on_their_ranks_share_nothing(make, store, other):
    """All have virtual blocks of 16 tokens, pages of the same size, or both."""
    engine = make(Shape(2, 2, 1, 8), store=store.path)
    engine.ask(1, 100)
    all_stored(engine, store)
    assert make(Shape(2, 2, 1, 8), store=store.path).ask(1, 100)[0] == 96, "an engine of the same shape"
    assert make(**other, store=store.path).ask(1, 100)[0] == 0


def test_parts_of_ranks_that_are_exchanged_in_a_store_are_found(make, store):
    engine = make(Shape(2, 2, 1, 8), store=store.path)
    engine.ask(1, 100)
    all_stored(engine, store)
    part = engine.connector._scheduler._store.plan.offsets[1][0]
    mapping = map_pool(store.path)
    slots = np.frombuffer(mapping.buffer, np.uint8).reshape(-1, 4096)
    slots = slots[np.flatnonzero(slots.any(axis=1))]
    one, other = slots[:, :part].copy(), slots[:, part : 2 * part].copy()
    everything = np.frombuffer(mapping.buffer, np.uint8).reshape(-1, 4096)
    rows = np.flatnonzero(everything.any(axis=1))
    everything[rows, :part], everything[rows, part : 2 * part] = other, one
    del everything, slots
    mapping.close()
    engine.forget()
    assert engine.ask(1, 100)[0] <= 0, "wrong, and computed; some even twice"


def test_prefill_context_parallelism_stores_what_its_ranks_repeat_once(make, store):
    engine = make(Shape(1, 1, 1, 16), store=store.path, pcp=2)
    assert engine.ask(1, 100)[0] == 0
    all_stored(engine, store)
    assert engine.connector._scheduler._store.plan.writes == [[True], [False]]
    engine.forget()
    assert engine.ask(1, 100)[0] == 96


PAIRS = {
    **{name: (shape, {}, shape) for name, shape in SIZES.items()},
    "to DCP": (Shape(1, 1, 1, 8), {}, Shape(2, 2, 8, 8)),
    "from DCP": (Shape(2, 2, 8, 8), {}, Shape(1, 1, 1, 8)),
    "PCP to DCP": (Shape(1, 1, 1, 8), {"pcp": 2}, Shape(2, 2, 8, 8)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_handoff(make, name):
    shape, more, other = PAIRS[name]
    prefill, decode = make(shape, **more), make(other)
    for prompt, length in enumerate((5, 16, 33, 100, 259), 20):
        _, params = prefill.ask(prompt, length, generated=1, do_remote_decode=True)
        taken, _ = decode.ask(prompt, length, **{**params, "do_remote_prefill": True, "do_remote_decode": False})
        assert taken == length - 1, length
