"""vLLM's pause after a step without tokens ends when a load has ended."""

import threading
import time
from types import SimpleNamespace

import pytest
from vllm.v1.engine import core

from vllm_kvtier.vllm_compat.hooks import step_pause
from vllm_kvtier.vllm_compat.hooks.step_pause import PAUSE_SECONDS, end_pause


@pytest.fixture
def waits(monkeypatch):
    """What the engine core's loop waited for, and whether the pause was over before."""
    monkeypatch.setattr(core, "time", time)
    step_pause.install()
    step_pause.install()
    found, event = [], threading.Event()

    def wait(seconds):
        found.append((seconds, event.is_set()))
        return event.is_set()

    over = SimpleNamespace(wait=wait, set=event.set, clear=event.clear)
    monkeypatch.setattr(step_pause, "_over", over)
    return found


class Loop(core.EngineCoreProc):
    """vLLM's own, with steps that compute nothing."""

    def __init__(self, waiting):
        self.scheduler = SimpleNamespace(has_requests=lambda: waiting, has_unfinished_requests=lambda: waiting)
        self.step_fn, self.post_step = lambda: (None, False), lambda model_executed: None


def test_pause_of_vllms_loop_is_left_out_once_after_a_load_ended(waits):
    Loop(True)._process_engine_step()
    end_pause()
    end_pause()
    for _ in range(2):
        Loop(True)._process_engine_step()
    assert waits == [(PAUSE_SECONDS, False), (PAUSE_SECONDS, True), (PAUSE_SECONDS, False)]


def test_module_time_of_engine_core_is_otherwise_the_same(waits):
    assert core.time.monotonic is time.monotonic and core.time.time is time.time
    core.time.sleep(0.0)
    assert not waits


def test_pause_ends_at_once_when_another_thread_ends_it(monkeypatch):
    monkeypatch.setattr(step_pause, "PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(core, "time", time)
    step_pause.install()
    threading.Timer(0.05, end_pause).start()
    core.time.sleep(60.0)  # the test's time limit is shorter
