"""An engine's scheduler side and worker side, driven by vLLM's own scheduler and the calls of its model runner, with a
node store, without a model and without a GPU; and a counter of the package's Python calls."""

import os
import threading
import time
from collections import Counter
from pathlib import Path

import pull_fakes
import torch
from pull_fakes import HEADS, INNER, FakeTransport, cache
from support import eventually
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

import vllm_kvtier
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.link import LinkPlace
from vllm_kvtier.worker import connector_worker
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory

PACKAGE = str(Path(vllm_kvtier.__file__).parent) + os.sep
LOOP = PACKAGE + os.path.join("wire", "reactor.py")
CONNECTOR, CONTAINMENT = PACKAGE + "connector.py", PACKAGE + "containment.py"
BLOCK = 16
STEP_SECONDS = 7e-3  # as a step takes on a GPU: polls of copies go by the clock
SHORT_REQUESTS = 32  # that may run beside those that an engine is made for


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
    blocks between two looks at a request; with 1 all are looked at in the same step. ``step_tokens``: most in a step;
    ``max_tokens``: of a request; ``ahead``: vLLM schedules a step before it has read the one before."""

    def __init__(
        self, calls, store, root, monkeypatch, requests, lot, step_tokens=8192, max_tokens=1024, blocks=0, ahead=False
    ):  # fmt: skip
        self.calls, self.store, self.names = calls, store, [f"r{n}" for n in range(requests)]
        # What comes once a second is left out, however long a second's steps take.
        monkeypatch.setattr("vllm_kvtier.scheduler.connector_scheduler.REPORT_SECONDS", 1e4)
        blocks = blocks or 8 * lot * requests + 2048
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32",
                max_model_len=max_tokens,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=requests + SHORT_REQUESTS, max_num_batched_tokens=step_tokens, max_model_len=max_tokens,
                is_encoder_decoder=False, async_scheduling=ahead or None,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector", kv_connector_module_path="vllm_kvtier.connector", kv_role="kv_both",
                kv_connector_extra_config={
                    "store": store.path, "model_fingerprint": "decode calls", "lookup_timeout": 60
                },
            ),
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=INNER // 2, dtype=torch.uint8)
        caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.core = EngineCore.__new__(EngineCore)
        self.scheduler = self.core.scheduler = (AsyncScheduler if ahead else Scheduler)(
            vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, hash_block_size=BLOCK, log_stats=False,
        )  # fmt: skip
        self.ours = self.scheduler.connector._scheduler
        self.ours._tables._lot = lot
        self.worker = KVTierConnector(config, KVConnectorRole.WORKER, caches)
        monkeypatch.setattr(connector_worker, "NixlTransport", Transport)
        side = self.worker._worker = KVTierConnectorWorker(
            0, "agent", LinkPlace(self.worker._link), [], self.worker.containment
        )
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
        names, requests = list(output.num_scheduled_tokens), self.scheduler.requests
        ends = [requests[name].num_computed_tokens >= requests[name].num_prompt_tokens for name in names]
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] if end else [] for end in ends], logprobs=None, prompt_logprobs_dict={},
            pooler_output=[], kv_connector_output=kv,
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
        """Calls of this engine for requests with prompts of so many blocks, which generate two tokens and are stored;
        and the number of steps."""
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
        return self.calls.counts.copy(), steps

    def end(self):
        self.scheduler.connector.shutdown()
        self.worker.shutdown()


class Transport(FakeTransport):
    def __init__(self, name, backends, limits):
        super().__init__()
        self.name = name
