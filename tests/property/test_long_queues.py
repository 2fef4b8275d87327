"""vLLM's own scheduler with a long queue of requests that a node store is asked for: calls counted in a step."""

import pytest
from decode_harness import BLOCK, Calls, Engine
from store_process import Store
from support import eventually
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from vllm_kvtier.scheduler.sources.store_source import NodeStoreSource
from vllm_kvtier.vllm_compat.hooks.waiting_loop import LOOKED_UP, MAX_SKIPPED

QUEUED = 600


@pytest.fixture
def engine(root, run_dir, monkeypatch, tmp_path):
    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    init_none_hash(sha256)
    store = Store(run_dir)
    store.start("--size=64MiB", f"--disk-path={tmp_path}/d", "--disk-size=256MiB")  # a tier: every prompt is looked up
    made = Engine(Calls(), store, root, monkeypatch, 224, 16, 8192, 4096, 200000)
    try:
        yield made, store
    finally:
        made.end()
        store.kill()


def test_long_queue_is_looked_up_in_parts_and_in_order(engine, monkeypatch):
    engine, store = engine
    engine.add("first", range(2 * BLOCK), 2)
    eventually(lambda: engine.step() and store.counts().index.entries > 1, 30, "stored")
    monkeypatch.setattr("vllm_kvtier.scheduler.matching.source_selector.SourceSelector.wait_briefly", lambda *of: None)
    # No answer is taken before the end of the step.
    sent, poll = [], "vllm_kvtier.scheduler.sources.base.PendingLookup.poll"
    with monkeypatch.context() as silent:
        silent.setattr(poll, lambda pending: None)
        ask, match = NodeStoreSource.ask, type(engine.ours).match
        monkeypatch.setattr(NodeStoreSource, "ask", lambda *of, **how: sent.append(1) or ask(*of, **how))
        matched: list[str] = []
        monkeypatch.setattr(
            type(engine.ours), "match", lambda ours, request, computed: (
                matched.append(request.request_id) or match(ours, request, computed)
            ),
        )  # fmt: skip
        names = [f"q{n}" for n in range(QUEUED)]
        for n, name in enumerate(names):
            engine.add(name, [n + 40, *range(1, 4 * BLOCK)], 4)
        for step in range(2):
            matched.clear()
            sent.clear()
            engine.step()
            assert matched == names[: len(matched)], "first come, first served"
            assert step * 32 <= len(matched) <= MAX_SKIPPED
            assert 0 < len(sent) <= MAX_SKIPPED // LOOKED_UP + 16, "and a few that are looked up ahead"
    eventually(lambda: engine.step() and not engine.scheduler.requests, 60, "all of them end")
