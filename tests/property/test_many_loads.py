"""Prompts that come together and are all in the store, before vLLM's scheduler, on links and engines of any speed: what
is loaded and what is computed, and that none waits for longer than computing all of them takes."""

import random

import pytest
from burst_harness import Burst, Machine
from store_process import Store
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine.core import EngineCore, EngineCoreProc


@pytest.fixture
def burst(root, run_dir, monkeypatch):
    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    init_none_hash(sha256)
    store, made = Store(run_dir), []
    store.start("--size=64MiB")

    def make(**options):
        made.append(Burst(store, root, monkeypatch, **options))
        return made[0]

    yield make
    for each in made:
        each.engine.end()
    store.kill()


def all_computed(burst, machine):
    return burst.count * machine.step_seconds([(burst.tokens, 0)]) + 2 * machine.least


@pytest.mark.parametrize(("ahead", "step_tokens"), [(0, 2048), (1, 2048), (1, 8192)])
def test_prompts_that_come_together_are_loaded_from_fast_memory(burst, ahead, step_tokens):
    """Of one that is computed, all whose loads end meanwhile wait for its step: 3 to 7 of 24 were computed."""
    burst = burst(ahead=ahead, step_tokens=step_tokens)
    for machine in (Machine(), Machine(least=0.01, launch=3e-3), Machine(gap=0.0), Machine(gap=0.01)):
        burst.learn(machine, machine.link)
        for _ in range(2):
            loaded, waits = burst.play(machine)
            assert loaded == burst.count, machine
            assert max(waits) < 0.2 * all_computed(burst, machine), machine


@pytest.mark.parametrize("ahead", [0, 1])
def test_prompts_that_come_together_wait_no_longer_than_computing_all_takes(burst, ahead):
    burst, rng = burst(ahead=ahead), random.Random(21 + ahead)
    for _ in range(16):
        least = rng.uniform(0.005, 0.03)
        machine = Machine(10 ** rng.uniform(8.7, 11.3), least, rng.uniform(0.1, 1) * least, rng.uniform(0, 0.02))
        burst.learn(machine, machine.link)
        loaded, waits = burst.play(machine)
        alone = all_computed(burst, machine)
        assert len(waits) == burst.count and max(waits) < 1.05 * alone, (machine, loaded)
        if machine.link < 2e9:  # the device computes while the link is busy
            assert loaded < burst.count / 2 and max(waits) < alone
