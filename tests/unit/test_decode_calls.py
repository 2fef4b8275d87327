"""Python calls of this package in one decode step, by thread and method of the connector: a guard without a clock.

vLLM's own scheduler and the calls of its model runner drive both sides of the connector, with a node store and nothing
to load. The bounds are what steps take today: lower them with each change that needs fewer calls, and raise none. Left
out: what comes once a second, as gauges, which take two calls a request.

    KVTIER_DECODE_CALLS=1 pytest -s tests/unit/test_decode_calls.py     prints the counts, and by which functions
"""

import os
import sys
import threading
from collections import Counter

import pytest
from decode_harness import BLOCK, SHORT_REQUESTS, Calls, Engine
from store_process import Store
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import RequestStatus

from vllm_kvtier.scheduler.offload.block_tables import LOT_BLOCKS
from vllm_kvtier.vllm_compat.hooks.interpreter import SwitchInterval

VERBOSE = bool(os.environ.get("KVTIER_DECODE_CALLS"))

# A step in which no block fills and no copy runs, whatever the number of requests; other threads do nothing.
NO_BLOCK_FILLS = {
    # SchedulerLock, around vLLM's schedule and update_from_output, and WaitingLoop and ``rollback.before_output``
    ("engine", "other"): 4,
    ("engine", "build_connector_meta"): 17,
    ("engine", "update_connector_output"): 2,
    ("engine", "get_kv_connector_stats"): 7,
    ("engine", "take_events"): 2,
    ("runner", "bind_connector_metadata"): 3,
    ("runner", "start_load_kv"): 2,
    ("runner", "wait_for_save"): 2,  # contained
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
# A machine with time needs a third of them: what comes while a thread waits for a core is taken at once or singly.
THREAD_CALLS_A_BLOCK = {"kvtier-scheduler": 4.0, "kvtier-worker-0": 2.4}
WAKES_A_STEP = {"kvtier-scheduler": 0.3, "kvtier-worker-0": 0.6}
STATS_OF_SAMPLED_STEP = 21  # get_kv_connector_stats, in every eighth step, whose time is observed
# Requests -> the same of any other step, which may have to unpin what has been stored: 2 a request.
OTHER_STEPS = {1: 95, 64: 200, 256: 600}
# A request with a short prompt that finds nothing, is computed and stored, and ends: calls beyond those of the steps.
# Without statistics: each step behind the last request reports, until all is stored, and how many those are depends on
# the clock.
REQUEST = {
    "on_new_request": 30,
    "get_num_new_matched_tokens": 55,
    "update_state_after_alloc": 13,
    "build_connector_meta": 36,
    "request_finished_all_groups": 90,  # 43 where nothing waits for the store: a busy machine's does
}
ALL_OF_REQUEST = 217
THREAD_CALLS_A_STORED_BLOCK = 3.2  # of ``kvtier-scheduler``, which reserves and commits it
# All blocks of such requests, which are stored together: the model runner issues their copies and polls them.
LOT = {
    ("runner", "get_transfer_results"): 200,
    ("kvtier-worker-0", ""): 300,  # 80 if the store answers at once: busy, it answers in up to three messages
    ("kvtier-worker-0", "wakes"): 24,
}
RUNNER_POLLS = 150  # get_transfer_results, in a step in which it polls copies
# Thread -> requests -> calls while each request fills two blocks. Half is slack, of the workers more: how often copies
# are polled, and how many messages are read at a time, depends on the clock (440 were seen on a busy machine).
OTHER_THREADS = {
    "kvtier-scheduler": {1: 60, 64: 740, 256: 2500},
    "kvtier-worker-0": {1: 60, 64: 300, 256: 600},
}
# Thread -> requests -> how often the thread wakes meanwhile, and takes the interpreter from vLLM's.
WAKES = {
    "kvtier-scheduler": {1: 10, 64: 12, 256: 12},
    "kvtier-worker-0": {1: 10, 64: 20, 256: 30},
}


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


def calls_of_requests(engine, number, blocks):
    """``Engine.requests`` beyond the calls of steps in which nothing happens."""
    counts, steps = engine.requests(number, blocks)
    counts.subtract({key: steps * count for key, count in NO_BLOCK_FILLS.items()})
    return counts


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
    steps = [engine.counted() for _ in range(4 * BLOCK - 5)]  # blocks fill in each BLOCK-th step, the first one too
    engine.all_stored()
    filling, quiet = steps[::BLOCK], [engine.counted() for _ in range(4)]
    show(requests, filling[-1], quiet[-1])

    methods = {key for counts, _ in quiet for key in counts}
    found = {key: min(counts[key] for counts, _ in quiet) for key in methods}  # a thread may be late
    assert beyond(found, NO_BLOCK_FILLS) == {}

    meta = "engine", "build_connector_meta"
    counts = {key: min(each[key] for each, _ in filling) for key in filling[0][0] if key[0] == "engine"}
    stats = {("engine", "get_kv_connector_stats"): STATS_OF_SAMPLED_STEP}
    assert beyond(counts, NO_BLOCK_FILLS | stats | {meta: BLOCK_FILLS[requests]}) == {}
    assert counts[meta] > NO_BLOCK_FILLS[meta], "no block was filled"
    assert max(each[meta] for n, (each, _) in enumerate(steps) if n % BLOCK) <= OTHER_STEPS[requests]

    # A busy machine polls more often for some blocks, hardly for each of three.
    fills = [[counts for counts, _ in steps[at : at + BLOCK]] for at in range(BLOCK, len(steps), BLOCK)]
    assert min(max(each["runner", "get_transfer_results"] for each in fill) for fill in fills) <= RUNNER_POLLS
    totals = [sum(fill, Counter()) for fill in fills]
    others = {key: 2 * min(each[key] for each in totals) for key in set().union(*totals)}
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
    short, long = calls_of_requests(engine, number, 6), calls_of_requests(engine, number, 14)
    # Without "other": all engines that this process had look at a request that is added.
    found = {method: count / number for (side, method), count in long.items() if method in REQUEST and side == "engine"}
    blocks = {key: (count - short[key]) / (8 * number) for key, count in long.items() if key[0] == "engine"}
    blocks.pop(("engine", "other"), None)
    lot = {key: count for key, count in long.items() if key in LOT}
    if VERBOSE:
        print(f"a request: {found}\na block: {blocks}\nthe lot: {lot}")
    assert beyond(found, REQUEST) == {} and sum(found.values()) <= ALL_OF_REQUEST
    assert beyond(blocks, dict.fromkeys(blocks, 0.2)) == {}
    assert long["kvtier-scheduler", ""] / (14 * number) <= THREAD_CALLS_A_STORED_BLOCK
    assert beyond(lot, LOT) == {}, "all blocks were copied, see ``Engine.requests``"


def test_other_threads_interrupt_launches_but_not_vllms_scheduler(engine_of):
    engine, seen = engine_of(2), {}

    def noting(owner, name):
        method = getattr(owner, name)

        def noted(*args, **kwargs):
            seen[name] = sys.getswitchinterval()
            return method(*args, **kwargs)

        setattr(owner, name, noted)

    noting(engine.scheduler.kv_cache_manager, "allocate_slots")
    noting(engine.worker, "start_load_kv")
    sys.setswitchinterval(SwitchInterval.short)  # as behind a step whose outputs were not read yet
    engine.step()
    seen["the answers go out"] = sys.getswitchinterval()
    own, short = SwitchInterval.own, SwitchInterval.short
    assert short < own
    assert seen == pytest.approx({"allocate_slots": own, "start_load_kv": short, "the answers go out": own})
    engine.ours._on_idle()
    assert sys.getswitchinterval() == pytest.approx(short)
    sys.setswitchinterval(own)
    engine.scheduler.finish_requests(list(engine.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    engine.scheduler.connector.get_kv_connector_stats()
    assert sys.getswitchinterval() == pytest.approx(short), "nothing is to be scheduled"
