"""A reset of vLLM's prefix cache that vLLM refuses, because a request is running."""

from decode_harness import BLOCK, Calls, Engine
from store_process import Store
from support import eventually
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request, RequestStatus


def test_refused_reset_leaves_exports_and_checksums(root, run_dir, monkeypatch):
    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    init_none_hash(sha256)
    store = Store(run_dir)
    store.start("--size=64MiB")
    engine = Engine(Calls(), store, root, monkeypatch, 8, 16)
    try:
        engine.add("first", range(2 * BLOCK), 2)
        eventually(lambda: engine.step() and store.counts().index.entries > 1, 30, "stored")
        transfer = {"kv_transfer_params": {"do_remote_decode": True}}
        params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, extra_args=transfer)
        params.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(BLOCK, sha256)
        engine.add("busy", range(1000, 1064), 500)
        engine.core.add_request(Request("prefill", list(range(300, 364)), params, None, block_hasher=hasher))
        exports = engine.ours._exports
        eventually(lambda: engine.step() and exports.has_handoffs(), 30, "exported")
        before = exports.counts()
        assert not engine.scheduler.reset_prefix_cache()
        assert exports.has_handoffs() and exports.counts() == before and not engine.ours._clearing.generation
        engine.scheduler.finish_requests("busy", RequestStatus.FINISHED_ABORTED)
        eventually(engine.scheduler.reset_prefix_cache, 20, "reset")
        assert not exports.has_handoffs() and engine.ours._clearing.generation
    finally:
        engine.end()
        store.kill()
