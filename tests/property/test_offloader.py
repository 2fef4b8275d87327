"""Lives of an engine at random, where each gives every block back; what is written, under what name, at what cost.

The engine, and what must hold of each copy, are in tests/offloader_harness.py.
"""

import time
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloader_harness import BLOCKS, GROUPS, HASH_BLOCK_SIZE, Engine, flush, run, stored
from support import WITHOUT_SHRINKING, make_request, step_output

from vllm_kvtier.scheduler.offload import offloader
from vllm_kvtier.vllm_compat import requests as vr


@pytest.mark.parametrize("lag", [0, 1], ids=["", "asynchronous"])
@pytest.mark.parametrize("groups", sorted(GROUPS))
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=40, phases=WITHOUT_SHRINKING)
def test_offloader_random_operations_keep_invariants(groups, lag, seed, share):
    engine = Engine(GROUPS[groups], seed, lag, share=share, lot=(1, 3, 16)[seed % 3])
    events = {
        engine.step: 8, engine.new_request: 2, engine.finish: 1.2, engine.preempt: 0.7, engine.reactor.run: 6,
        engine.store_answers: 6, engine.store_forgets: 0.5, engine.store_restarts: 0.5, engine.worker_acts: 12,
        lambda: engine.offloader.cancel_for_requests(engine.rng.randint(1, 9)): 0.5,
        lambda: engine.offloader.cancel_all(0): 0.1,
    }  # fmt: skip
    for _ in range(300):
        engine.rng.choices(list(events), list(events.values()))[0]()
        engine.bounds()
    engine.end()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("write, tokens", [("all", 50), ("prompt", 20), ("off", 0)])
def test_offloader_writes_whole_blocks_of_prompt_and_output(write, tokens, lag):
    engine = Engine(GROUPS["full"], 1, lag, write)
    r = engine.new_request([i % 7 for i in range(50)], 21)
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(tokens // HASH_BLOCK_SIZE))
    assert engine.tier.asked == [] and engine.offloader.pinned == 0
    assert not len(engine.tables)


def test_offloader_adapter_uses_its_own_namespace():
    engine = Engine(GROUPS["full"], 0, 0)
    r = engine.new_request([i % 7 for i in range(12)], 12)
    r.request.lora_request = SimpleNamespace(lora_name="a", lora_path="")
    setattr(r.request, vr._LORA_FINGERPRINT, b"its files")
    run(engine, r)
    engine.new_request([i % 7 for i in range(12)], 12)
    engine.step(every=1.1)
    engine.step(every=1.1)
    flush(engine, r)
    namespaces = {items[0].namespace_id for _, items in engine.tier.asked}
    assert len(namespaces) == len(engine.tier.asked) == 2


def test_offloader_step_of_256_decodes_takes_under_2_ms():
    """256 requests: what a step costs the scheduler's thread beside the requests that fill a block."""
    engine = Engine(GROUPS["full"], 0, 0)
    tracked = {}
    for i in range(256):
        request = make_request(f"d{i}", [1] * (3 * HASH_BLOCK_SIZE + 1), HASH_BLOCK_SIZE)
        request.num_computed_tokens = 3 * HASH_BLOCK_SIZE + 1
        tracked[request.request_id] = SimpleNamespace(request=request)
    scheduled = dict.fromkeys(tracked, 1)
    engine.tables.begin_step(step_output(scheduled, [(name, ([1, 2, 3, 4],), 0) for name in tracked]), tracked.get)
    output = step_output(scheduled, cached=[(name, (), 13, False) for name in tracked])
    took = []
    for _ in range(20):
        began = time.perf_counter()
        growth = engine.tables.begin_step(output, tracked.get)
        engine.offloader.begin_step(1, growth)
        took.append(time.perf_counter() - began)
    assert not growth and min(took) < 2e-3, f"{min(took) * 1e6:.0f} us a step"


def test_offloader_reserves_prompt_soon_and_output_in_larger_batches():
    soon, late = offloader.RESERVE_AFTER_STEPS
    engine = Engine(GROUPS["full"], 1, 0)
    engine.new_request([i % 7 for i in range(6 * HASH_BLOCK_SIZE + 3 * late)], 6 * HASH_BLOCK_SIZE)
    steps = []
    for number in range(soon + 2 * late):
        before = len(engine.tier.asked)
        engine.step(every=1.1)
        engine.reactor.run()
        steps += [number] * (len(engine.tier.asked) - before)
    first, second = steps[:2]
    assert soon <= first <= soon + 6, "a few steps for the prompt, and then some more"
    assert late <= second - first <= late + HASH_BLOCK_SIZE + 1, "from the next block on"


@pytest.mark.parametrize("scarce", [False, True])
def test_offloader_reserves_output_soon_when_blocks_are_scarce(scarce):
    """Its request may end, and vLLM give its blocks to a prompt, before a large lot is full."""
    soon, late = offloader.RESERVE_AFTER_STEPS
    engine = Engine(GROUPS["full"], 1, 0, step_tokens=1 << 20)  # a step takes any block that is free
    engine.new_request([i % 7 for i in range(6 * HASH_BLOCK_SIZE + 3 * late)], 6 * HASH_BLOCK_SIZE)

    def steps(count):
        for _ in range(count):
            engine.step(every=1.1)
            engine.reactor.run()

    steps(soon + 6)
    assert len(engine.tier.asked) == 1, "the prompt's"
    for block in engine.fake.free_ids()[BLOCKS // 5 if scarce else BLOCKS // 3 :]:
        engine.fake.take(block)
    steps(soon + HASH_BLOCK_SIZE + 1)
    assert len(engine.tier.asked) == (2 if scarce else 1)


@pytest.mark.parametrize("scarce", [False, True])
def test_offloader_reserves_prompt_at_once_when_blocks_are_scarce(scarce):
    """A short answer ends within the few steps, and the next request gets the blocks before they are copied."""
    engine = Engine(GROUPS["full"], 1, 0, step_tokens=1 << 20)  # a step takes any block that is free
    for block in engine.fake.free_ids()[BLOCKS // 5 if scarce else BLOCKS // 2 :]:
        engine.fake.take(block)
    engine.new_request([i % 7 for i in range(6 * HASH_BLOCK_SIZE)], 6 * HASH_BLOCK_SIZE)
    for _ in range(offloader.RESERVE_AFTER_STEPS[0] - 1):
        engine.step(every=1.1)
        engine.reactor.run()
    assert bool(engine.tier.asked) is scarce


@pytest.mark.parametrize("scarce", [False, True])
def test_offloader_reserves_prompt_at_once_when_a_request_with_blocks_lacks_more_than_are_free(scarce):
    """Any that was just loaded lacks some, mostly far fewer than are free."""
    engine = Engine(GROUPS["full"], 1, 0)
    engine.new_request([i % 7 for i in range(6 * HASH_BLOCK_SIZE)], 6 * HASH_BLOCK_SIZE)
    begin = engine.offloader.begin_step
    for _ in range(offloader.RESERVE_AFTER_STEPS[0] - 1):
        needed = engine.fake.get_num_free_blocks() + 1 if scarce else 3
        engine.offloader.begin_step = partial(begin, needed=needed)
        engine.step(every=1.1)
        engine.reactor.run()
    assert bool(engine.tier.asked) is scarce
