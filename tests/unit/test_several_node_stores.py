"""An engine over two nodes with the store of each: vLLM's own scheduler, a rank on each node with the calls of its
model runner, and real stores, without a model. A rank's KV is random bytes, which must come back to it. The second rank
reaches the scheduler side by the relay. With real engines: ``tests/engines/test_several_nodes.py``."""

import copy
import os
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pull_fakes
import pytest
import torch
from decode_harness import BLOCK, Transport
from pull_fakes import HEADS, INNER, cache
from store_process import Store
from store_support import map_pool
from support import eventually, stop
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.scheduler.sources import node_store
from vllm_kvtier.store import launcher
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.link import LinkPlace, LinkRelay
from vllm_kvtier.worker import connector_worker, peer_exchange
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.store import store_worker

BLOCKS, PROMPT = 256, 20  # of the cache, and of a prompt
WHOLE = PROMPT * BLOCK  # tokens
TIMEOUT = 0.5


class Engine:
    disks = False  # whether stores that are started have one

    def __init__(self, stores, root, folder, monkeypatch):
        self.stores, self.count, self.loaded = stores, 0, 0
        options = {
            "store": "auto", "model_fingerprint": "several nodes", "load_policy": "always", "lookup_timeout": TIMEOUT,
            "transfer_timeout": 5.0,
        }  # fmt: skip
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            parallel_config=ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=1024, is_encoder_decoder=False
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector", kv_connector_module_path="vllm_kvtier.connector", kv_role="kv_both",
                kv_connector_extra_config=options,
            ),
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=INNER // 2, dtype=torch.uint8)
        caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        monkeypatch.setattr(node_store, "store_path", lambda: stores[0].path)
        monkeypatch.setattr(node_store, "start_store", lambda path, options: self.start(0, path))
        monkeypatch.setattr(store_worker, "store_path", lambda: stores[1].path)
        monkeypatch.setattr(store_worker, "start_store", lambda path, options: self.start(1, path))
        node = lambda: threading.current_thread().name  # noqa: E731 - a reactor a rank
        monkeypatch.setattr(peer_exchange, "node_name", node)
        monkeypatch.setattr(connector_worker, "NixlTransport", Transport)
        monkeypatch.setattr(pull_fakes, "TOKENS", BLOCK)
        self.core = EngineCore.__new__(EngineCore)
        self.scheduler = self.core.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, hash_block_size=BLOCK, log_stats=False,
        )  # fmt: skip
        self.source = self.scheduler.connector._scheduler._store
        self.source.on_loaded = self.on_loaded
        path = str(folder / "key")
        ClusterKey.create(path)
        key = ClusterKey.load(path)
        self.ranks = [KVTierConnector(config, KVConnectorRole.WORKER, caches) for _ in range(2)]
        link = self.ranks[0]._link
        self.relay = LinkRelay(link, "127.0.0.1", key)
        places = [LinkPlace(link), LinkPlace(f"tcp://127.0.0.1:{self.relay.port}", key)]
        self.views = [cache(BLOCKS, seed) for seed in range(2)]
        for rank, worker in enumerate(self.ranks):
            worker._worker = KVTierConnectorWorker(rank, f"agent {rank}", places[rank], [], worker.containment)
            view, heads = self.views[rank], (m.HeadRange(rank * HEADS, 2 * HEADS),)
            worker._worker.register(
                CacheSetup(
                    lambda view=view: view, lambda v: CacheMemory(v, False), lambda v, rank=rank: (rank,),
                    lambda v, heads=heads: heads,
                )
            )  # fmt: skip
        self.group = None
        monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: self.group)
        monkeypatch.setattr(runner, "get_forward_context", lambda: None)
        self.outputs = KVOutputAggregator(2)

    def on_loaded(self, state):
        self.loaded = state.num_external_tokens

    def start(self, node, path):
        assert path == self.stores[node].path
        disk = (f"--disk-path={self.stores[node].folder / 'disk'}", "--disk-admission=all") if self.disks else ()
        self.stores[node].start("--size=16MiB", *disk)

    def until_connected(self):
        self.ask(0)
        eventually(lambda: self.step() or self.source.limit(), 60, "both stores serve, and both ranks reach theirs")

    def step(self):
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        results = []
        for rank in self.ranks:
            self.group = rank
            with runner.KVConnectorModelRunnerMixin._get_kv_connector_output(copy.deepcopy(output)) as kv:
                self.forward(self.ranks.index(rank), output)
            results.append(
                ModelRunnerOutput(
                    req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
                    sampled_token_ids=[[7]] * len(names), logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
                    kv_connector_output=kv,
                )
            )  # fmt: skip
        time.sleep(1e-3)
        self.scheduler.update_from_output(output, self.outputs.aggregate(results))

    def content(self, rank, block_hash):
        """The KV that this rank computes for a block: uint8 of all regions."""
        generator = torch.Generator().manual_seed(int.from_bytes(block_hash[:6], "little") * 2 + rank)
        view = self.views[rank]
        shape = (len(view.groups[0].regions), *view.pages(view.groups[0].regions[0]).shape[1:])
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def forward(self, rank, output):
        view = self.views[rank]
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens  # vLLM has added those of this step already
            [blocks] = self.scheduler.kv_cache_manager.get_block_ids(name)
            for i in range((end - count) // BLOCK, min(end // BLOCK, len(request.block_hashes))):
                for region, content in zip(
                    view.groups[0].regions, self.content(rank, request.block_hashes[i]), strict=True
                ):
                    view.pages(region)[blocks[i]] = content

    def ask(self, seed):
        """A request for the prompt of this number, whose KV is right. Returns the tokens that came from the stores."""
        self.count += 1
        self.loaded = 0
        params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        tokens = [seed, *range(1, PROMPT * BLOCK + 1)]
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(f"r{self.count}", tokens, params, None, block_hasher=hasher)
        self.hashes = request.block_hashes[:PROMPT]
        self.core.add_request(request)
        until, blocks = time.monotonic() + 30, []
        while self.scheduler.has_unfinished_requests():
            assert time.monotonic() < until
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0] or blocks
            self.step()
        for rank, view in enumerate(self.views):
            for i in range(PROMPT):
                content = torch.stack([view.pages(region)[blocks[i]] for region in view.groups[0].regions])
                assert torch.equal(content, self.content(rank, request.block_hashes[i])), f"rank {rank}, block {i}"
        return self.loaded

    def loads(self, seed):
        """As ``ask``, when the caches have nothing of it."""
        eventually(lambda: self.step() or self.scheduler.reset_prefix_cache(), 30)
        for view in self.views:
            for region in view.groups[0].regions:
                view.pages(region).random_(0, 256)
        return self.ask(seed)

    def until_loads(self, seed):
        """What a store lacks is stored there again."""
        eventually(lambda: self.ask(seed) >= 0 and self.idle() and self.loads(seed) == WHOLE, 40, "all comes from both")

    def kill(self, *nodes):
        """Returns when the scheduler side has seen it."""
        for node in nodes:
            self.stores[node].kill()
        eventually(lambda: (self.step(), not self.source.limit())[1], 40, "a store's end is seen")

    def idle(self):
        """The stores serve, and nothing is being copied."""

        def quiet():
            self.step()
            return self.source.limit() and all(is_idle(store) for store in self.stores)

        return eventually(quiet, 40, "both serve")

    def end(self):
        self.scheduler.connector.shutdown()
        for rank in self.ranks:
            rank.shutdown()
        self.relay.shutdown()


@pytest.fixture
def engine(root, run_dir, monkeypatch, tmp_path):
    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    init_none_hash(sha256)
    monkeypatch.setattr(launcher, "RESTART_SECONDS", 0.0)  # the test's stores were not launched by an engine
    stores = []
    for name in "ab":
        (run_dir / name).mkdir()
        stores.append(Store(run_dir / name))
    made = Engine(stores, root, tmp_path, monkeypatch)
    made.until_connected()
    yield made
    made.end()
    for store in stores:
        eventually(lambda store=store: store.process is None or is_idle(store), 10, "nothing is held")
        store.kill()


@contextmanager
def map_pool_of(store):
    mapping = map_pool(store.path)
    yield mapping
    mapping.close()


def is_idle(store):
    counts = store.counts()
    held = counts.index.leases + counts.index.reservations
    return not held and all(tier.state == "ready" for tier in counts.tiers)


@pytest.fixture(autouse=True)
def nothing_is_counted_as_wrong(caplog):
    yield
    assert "Traceback" not in caplog.text and "internal error" not in caplog.text


def test_engine_over_two_nodes_loads_each_ranks_kv_from_its_nodes_store(engine):
    """Each store was started by a process of its node."""
    assert engine.ask(1) == 0 and engine.idle()
    assert engine.loads(1) == WHOLE
    assert len({store.counts().instance for store in engine.stores}) == 2
    assert all(store.counts().index.entries >= PROMPT for store in engine.stores)
    assert engine.ask(2) == 0 and engine.idle() and engine.loads(2) == WHOLE and engine.loads(1) == WHOLE


@pytest.mark.parametrize("node", range(2))
def test_engine_over_two_nodes_computes_while_a_store_is_dead_or_hangs(engine, node):
    engine.until_loads(1)
    store, began = engine.stores[node], time.monotonic()
    stop(store.process.pid)
    try:
        assert engine.loads(1) == 0 and time.monotonic() - began < 20
    finally:
        os.kill(store.process.pid, signal.SIGCONT)
    engine.until_loads(1)
    store.kill()
    assert engine.loads(1) == 0
    engine.until_loads(1)


@pytest.mark.parametrize("lost", ["StoreBlocks", "Stored"])
def test_store_jobs_that_a_cut_link_lost_end(engine, lost):
    """When the link is there again; until then their blocks are pinned, in the engine and in the stores."""
    engine.until_loads(1)
    worker, dropped = engine.ranks[1]._worker, []
    place, name = (worker._store, "_send") if lost == "Stored" else (worker._link, "_on_message")
    passed = getattr(place, name)
    with pytest.MonkeyPatch.context() as patch:
        drops = lambda each: dropped.append if isinstance(each, getattr(lm, lost)) else passed  # noqa: E731
        patch.setattr(place, name, lambda each: drops(each)(each))
        assert engine.ask(2) == 0
        eventually(lambda: engine.step() or dropped, 10)
    assert not is_idle(engine.stores[0])
    worker._reactor.call_soon(worker._on_connected)
    engine.until_loads(2)
    assert not engine.scheduler.connector._scheduler._offloader.jobs._flights


def test_wrong_blocks_of_one_store_are_computed_and_stored_again(engine):
    engine.until_loads(1)
    with map_pool_of(engine.stores[1]) as memory:
        pages = np.frombuffer(memory.buffer, np.uint8).reshape(-1, PAGE)
        for page in np.flatnonzero(pages.any(axis=1)).tolist():
            pages[page, np.flatnonzero(pages[page])[0]] ^= 1
        del pages
    assert engine.loads(1) == 0
    engine.until_loads(1)


def test_engine_over_two_nodes_loads_from_the_disks_of_both_stores(engine):
    engine.disks = True
    engine.kill(0, 1)
    engine.idle()
    engine.until_loads(0)  # as before, so that the blocks on the disks are of this prompt alone
    eventually(lambda: all(store.disk().blocks >= PROMPT for store in engine.stores), 30, "all is on disk")
    for node in (1, 0):  # the other one has it in memory
        engine.kill(node)
        assert engine.idle() and not engine.stores[node].counts().index.entries

        def promoted(node=node):  # asked for again: its disk may not be open yet
            return engine.source.promote(engine.hashes, b"") and engine.stores[node].counts().index.entries >= PROMPT

        eventually(promoted, 40, "it is promoted")
        assert engine.loads(0) == WHOLE
