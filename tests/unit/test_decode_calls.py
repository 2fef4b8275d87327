"""Python calls of this package in one decode step, by thread and method of the connector: a guard without a clock.

vLLM's own scheduler and the calls of its model runner drive both sides of the connector, with a node store and nothing
to load. The bounds are what steps take today: lower them with each change that needs fewer calls, and raise none. Left
out: what comes once a second, as gauges, which take two calls a request.

    KVTIER_DECODE_CALLS=1 pytest -s tests/unit/test_decode_calls.py     prints the counts, and by which functions
"""

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median_low

import pull_fakes
import pytest
import torch
from pull_fakes import HEADS, INNER, FakeTransport, cache
from store_process import Store
from support import eventually
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

import vllm_kvtier
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.scheduler.offload.block_tables import LOT_BLOCKS
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker import connector_worker
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory

PACKAGE = str(Path(vllm_kvtier.__file__).parent) + os.sep
LOOP = PACKAGE + os.path.join("wire", "reactor.py")
CONNECTOR, CONTAINMENT = PACKAGE + "connector.py", PACKAGE + "containment.py"
BLOCK = 16
STEP_SECONDS = 7e-3  # as a step takes on a GPU: polls of copies go by the clock
VERBOSE = bool(os.environ.get("KVTIER_DECODE_CALLS"))

# A step in which no block fills and no copy runs, whatever the number of requests; other threads do nothing.
NO_BLOCK_FILLS = {
    ("engine", "other"): 2,  # SchedulerLock, around vLLM's schedule and update_from_output
    ("engine", "build_connector_meta"): 17,
    ("engine", "update_connector_output"): 2,
    ("engine", "get_kv_connector_stats"): 7,
    ("engine", "take_events"): 2,
    ("runner", "bind_connector_metadata"): 3,
    ("runner", "start_load_kv"): 2,
    ("runner", "wait_for_save"): 1,
    ("runner", "get_transfer_results"): 7,
    ("runner", "get_finished"): 6,  # called by vLLM before 0.30, in place of get_transfer_results
    ("runner", "get_block_ids_with_load_errors"): 1,
    ("runner", "get_kv_connector_stats"): 2,
    ("runner", "build_connector_worker_meta"): 1,
}
# Requests -> calls of build_connector_meta in a step in which each request fills a block and is looked at: about 21 a
# request. The last few depend on whether a socket takes a message at once.
BLOCK_FILLS = {1: 50, 64: 1400, 256: 5450}
# With lots of 16 blocks, per block.
CALLS_A_BLOCK = 1.7
THREAD_CALLS_A_BLOCK = {"kvtier-scheduler": 2.7, "kvtier-worker-0": 0.8}
WAKES_A_STEP = {"kvtier-scheduler": 0.2, "kvtier-worker-0": 0.4}
STATS_OF_SAMPLED_STEP = 21  # get_kv_connector_stats, in every eighth step, whose time is observed
# Requests -> the same of any other step, which may have to unpin what has been stored: 2 a request.
OTHER_STEPS = {1: 95, 64: 200, 256: 600}
# A request with a short prompt that finds nothing, is computed and stored, and ends: calls beyond those of the steps.
SHORT_REQUESTS = 32
REQUEST = {
    "on_new_request": 21,
    "get_num_new_matched_tokens": 55,
    "update_state_after_alloc": 13,
    "build_connector_meta": 36,
    "get_kv_connector_stats": 1,
    "request_finished_all_groups": 43,
}
ALL_OF_REQUEST = 168
THREAD_CALLS_A_STORED_BLOCK = 3.2  # of ``kvtier-scheduler``, which reserves and commits it
# All blocks of such requests, which are stored together: the model runner issues their copies and polls them.
LOT = {
    ("runner", "get_transfer_results"): 200,
    ("kvtier-worker-0", ""): 80,
    ("kvtier-worker-0", "wakes"): 8,
}
RUNNER_POLLS = 150  # get_transfer_results, in a step in which it polls copies
# Thread -> requests -> calls while each request fills two blocks. Half is slack: how often copies are polled, and how
# many messages are read at a time, depends on the clock.
OTHER_THREADS = {
    "kvtier-scheduler": {1: 60, 64: 740, 256: 2500},
    "kvtier-worker-0": {1: 60, 64: 240, 256: 400},
}
# Thread -> requests -> how often the thread wakes meanwhile, and takes the interpreter from vLLM's.
WAKES = {
    "kvtier-scheduler": {1: 10, 64: 12, 256: 12},
    "kvtier-worker-0": {1: 10, 64: 20, 256: 30},
}


class Calls:
    """Counts calls of the package's functions by (side, the connector's method that vLLM called, or "other"). Sides are
    "engine" for vLLM's scheduler and "runner" for its model runner. On other threads: by (the thread's name, ""),
    without the loop that waits; (the thread's name, "wakes") is how often that loop ran."""

    def __init__(self):
        self.counts: Counter[tuple[str, str]] = Counter()
        self.functions: Counter[tuple[str, str]] = Counter()
        self.side, self.counting, self.main = "", False, threading.get_ident()
        self._entries = []  # of the main thread, where vLLM's code calls ours: (frame, method)

    def __call__(self, frame, event, arg):
        if event == "call":
            if self.counting and frame.f_code.co_filename.startswith(PACKAGE):
                self._called(frame, frame.f_code)
        elif event == "return" and self._entries and self._entries[-1][0] is frame:
            self._entries.pop()

    def _called(self, frame, code):
        side, method = self.side, ""
        if threading.get_ident() != self.main:
            side = threading.current_thread().name
            if code.co_filename == LOOP:
                self.counts[side, "wakes"] += code.co_name == "_timeout_ms"  # once before each poll(2)
                return
        elif not side:
            return
        else:
            if not frame.f_back.f_code.co_filename.startswith(PACKAGE):
                name = code.co_name if code.co_filename == CONNECTOR else "other"
                if code.co_filename == CONTAINMENT:
                    name = frame.f_locals["method"].__name__
                self._entries.append((frame, name))
            method = self._entries[-1][1]
        self.counts[side, method] += 1
        self.functions[side, f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"] += 1


class Engine:
    """An engine whose requests all begin in the same step, so that they fill their blocks in the same steps. ``lot``:
    blocks between two looks at a request; with 1 all are looked at in the same step."""

    def __init__(self, calls, store, root, monkeypatch, requests, lot):
        self.calls, self.store, self.names = calls, store, [f"r{n}" for n in range(requests)]
        blocks = 8 * lot * requests + 2048
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=requests + SHORT_REQUESTS, max_num_batched_tokens=8192, max_model_len=1024,
                is_encoder_decoder=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector", kv_connector_module_path="vllm_kvtier.connector", kv_role="kv_both",
                kv_connector_extra_config={"store": store.path, "model_fingerprint": "decode calls"},
            ),
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=INNER // 2, dtype=torch.uint8)
        caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.core = EngineCore.__new__(EngineCore)
        self.scheduler = self.core.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, hash_block_size=BLOCK, log_stats=False,
        )  # fmt: skip
        self.ours = self.scheduler.connector._scheduler
        self.ours._tables._lot = lot
        self.worker = KVTierConnector(config, KVConnectorRole.WORKER, caches)
        monkeypatch.setattr(connector_worker, "NixlTransport", Transport)
        side = self.worker._worker = KVTierConnectorWorker(0, "agent", self.worker._link, [], self.worker.containment)
        monkeypatch.setattr(pull_fakes, "TOKENS", BLOCK)
        view = cache(blocks, 1)
        heads = (m.HeadRange(0, HEADS),)
        side.register(CacheSetup(lambda: view, lambda v: CacheMemory(v, False), lambda v: (0,), lambda v: heads))
        monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: self.worker)
        monkeypatch.setattr(runner, "get_forward_context", lambda: None)

    def begin(self):
        """Prompts of almost a block, when blocks of another request have been stored."""
        self.add("first", range(2 * BLOCK))
        eventually(lambda: self.step() and self.store.counts().index.entries > 1, 30, "blocks are stored")
        self.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
        self.worker._worker._store.on_device = True  # as on a GPU: the model runner polls copies
        self.step()
        for n, name in enumerate(self.names):
            self.add(name, [n, *range(1, BLOCK - 1)])
        assert set(self.step().num_scheduled_tokens.values()) == {BLOCK - 1}

    def add(self, name, tokens, generated=900):
        params = SamplingParams(max_tokens=generated, ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, list(tokens), params, None, block_hasher=hasher)
        self.calls.counting, self.calls.side = True, "engine"
        self.core.add_request(request)
        self.calls.counting, self.calls.side = False, ""

    def step(self):
        calls = self.calls
        calls.counting, calls.side = True, "engine"
        output = self.scheduler.schedule()
        calls.side = "runner"
        with runner.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as kv:
            pass
        calls.side = ""
        time.sleep(STEP_SECONDS)
        calls.side = "engine"
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names), logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            kv_connector_output=kv,
        )  # fmt: skip
        self.scheduler.update_from_output(output, result)
        calls.side = ""
        self.quiet()
        calls.counting = False
        return output

    def quiet(self):
        """All that other threads were given has run."""
        for reactor in (self.worker._worker._reactor, self.ours._reactor) * 2:
            done = threading.Event()
            reactor.call_soon(done.set)
            assert done.wait(20)
            self.calls.counts[reactor._thread.name, "wakes"] -= self.calls.counting

    def all_stored(self):
        eventually(lambda: self.store.counts().index.reservations == 0, 30, "all reserved blocks are stored")
        self.quiet()

    def counted(self):
        """A decode step's counts, and those by function."""
        self.calls.counts.clear()
        self.calls.functions.clear()
        assert set(self.step().num_scheduled_tokens) == set(self.names)
        return self.calls.counts.copy(), self.calls.functions.copy()

    def requests(self, number, blocks):
        """Calls of this engine for requests with prompts of so many blocks, which generate two tokens and are stored,
        beyond those of steps in which nothing happens."""
        self.all_stored()
        self.calls.counts.clear()
        self.calls.functions.clear()
        for n in range(number):
            self.add(f"{blocks} {n}", [1000 * blocks + n, *range(1, blocks * BLOCK + 1)], 2)
        entries, steps = self.store.counts().index.entries, 0

        def stored():
            nonlocal steps
            steps += 1
            self.step()
            return self.store.counts().index.entries - entries

        eventually(lambda: stored() >= number * blocks, 30, "all blocks are stored")
        self.all_stored()
        counts = self.calls.counts.copy()
        counts.subtract({key: steps * count for key, count in NO_BLOCK_FILLS.items()})
        return counts

    def end(self):
        self.scheduler.connector.shutdown()
        self.worker.shutdown()


class Transport(FakeTransport):
    def __init__(self, name, backends, movable):
        super().__init__()
        self.name = name


@pytest.fixture
def engine_of(root, run_dir, monkeypatch):
    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    init_none_hash(sha256)
    store, calls, made = Store(run_dir), Calls(), []
    store.start("--size=64MiB")
    threading.setprofile(calls)

    def make(requests, lot=1):
        made.append(Engine(calls, store, root, monkeypatch, requests, lot))
        made[0].begin()
        sys.setprofile(calls)
        return made[0]

    yield make
    sys.setprofile(None)
    threading.setprofile(None)
    for engine in made:
        engine.end()
    store.kill()


def show(requests, *steps):
    """Print them if the environment asks for it."""
    for name, (counts, functions) in zip(("a block of each fills", "no block fills"), steps, strict=True):
        if VERBOSE:
            print(f"\n{requests} requests, {name}: {sum(counts.values())} calls")
            for (thread, method), count in sorted(counts.items()):
                print(f"{count:6} {thread} {method}")
            for (thread, function), count in functions.most_common(20):
                print(f"{count:12} {thread} {function}")


def beyond(counts, bounds):
    """What is more than today, or has no bound."""
    return {key: count for key, count in counts.items() if count > bounds.get(key, 0)}


@pytest.mark.parametrize("requests", [1, 64, 256])
def test_decode_step_calls_stay_within_bounds_for_any_number_of_requests(engine_of, requests):
    engine = engine_of(requests)
    steps = [engine.counted() for _ in range(3 * BLOCK - 5)]  # blocks fill in each BLOCK-th step, the first one too
    engine.all_stored()
    filling, quiet = steps[::BLOCK], [engine.counted() for _ in range(4)]
    show(requests, filling[-1], quiet[-1])

    methods = {key for counts, _ in quiet for key in counts}
    found = {key: median_low([counts[key] for counts, _ in quiet]) for key in methods}
    assert beyond(found, NO_BLOCK_FILLS) == {}

    meta = "engine", "build_connector_meta"
    counts = {key: min(each[key] for each, _ in filling) for key in filling[0][0] if key[0] == "engine"}
    stats = {("engine", "get_kv_connector_stats"): STATS_OF_SAMPLED_STEP}
    assert beyond(counts, NO_BLOCK_FILLS | stats | {meta: BLOCK_FILLS[requests]}) == {}
    assert counts[meta] > NO_BLOCK_FILLS[meta], "no block was filled"
    assert max(each[meta] for n, (each, _) in enumerate(steps) if n % BLOCK) <= OTHER_STEPS[requests]
    assert max(each["runner", "get_transfer_results"] for each, _ in steps) <= RUNNER_POLLS

    others = Counter()
    for counts, _ in steps[BLOCK:]:
        others.update(counts)
    wakes = {thread: count for (thread, method), count in others.items() if method == "wakes"}
    others = {thread: count for (thread, method), count in others.items() if not method}
    assert beyond(others, {thread: bounds[requests] for thread, bounds in OTHER_THREADS.items()}) == {}
    assert beyond(wakes, {thread: bounds[requests] for thread, bounds in WAKES.items()}) == {}


def test_lots_of_generated_blocks_cost_few_calls_a_block(engine_of):
    """Requests are looked at once a lot, each in a step of its own; the blocks of many steps are reserved together."""
    requests, blocks = 64, 2 * LOT_BLOCKS
    engine = engine_of(requests, LOT_BLOCKS)
    steps = [engine.counted()[0] for _ in range(blocks * BLOCK)]
    meta = "engine", "build_connector_meta"
    quiet = NO_BLOCK_FILLS[meta]
    calls = sum(max(0, each[meta] - quiet) for each in steps) / (requests * blocks)
    threads = {name: sum(each[name, ""] for each in steps) / (requests * blocks) for name in OTHER_THREADS}
    wakes = {name: sum(each[name, "wakes"] for each in steps) / len(steps) for name in OTHER_THREADS}
    if VERBOSE:
        print(f"a block: {calls:.1f} calls of build_connector_meta, {threads}; wakes a step: {wakes}")
    assert calls <= CALLS_A_BLOCK
    assert beyond(threads, THREAD_CALLS_A_BLOCK) == {} and beyond(wakes, WAKES_A_STEP) == {}


def test_requests_that_find_nothing_cost_few_calls_each_and_none_a_block(engine_of):
    """They come, are matched and computed, stored, and end."""
    engine, number = engine_of(1, LOT_BLOCKS), SHORT_REQUESTS
    engine.requests(number, 4)
    short, long = engine.requests(number, 6), engine.requests(number, 14)
    # Without "other": all engines that this process had look at a request that is added.
    found = {method: count / number for (side, method), count in long.items() if method in REQUEST and side == "engine"}
    blocks = {key: (count - short[key]) / (8 * number) for key, count in long.items() if key[0] == "engine"}
    lot = {key: count for key, count in long.items() if key in LOT}
    if VERBOSE:
        print(f"a request: {found}\na block: {blocks}\nthe lot: {lot}")
    assert beyond(found, REQUEST) == {} and sum(found.values()) <= ALL_OF_REQUEST
    assert beyond(blocks, dict.fromkeys(blocks, 0.2)) == {}
    assert long["kvtier-scheduler", ""] / (14 * number) <= THREAD_CALLS_A_STORED_BLOCK
    assert beyond(lot, LOT) == {} and lot["runner", "get_transfer_results"] > 0, "nothing was copied"
