"""Which of vLLM's schedulers is ours: in engines with a loop, without one, and within a MultiConnector."""

import copy
import os
import queue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support import Uncontained, make_request
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvtier import connector as ours
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.vllm_compat.connector_types import StepMetadata, WorkerReport
from vllm_kvtier.vllm_compat.hooks.idle_hook import EngineThread
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

BLOCK = 32
KVTIER = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "vllm_kvtier.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"store": "off"},
}
OTHER = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


@pytest.fixture
def engine(root, monkeypatch):
    """Makes engine cores without processes: vLLM's scheduler of an engine with these connectors and KV cache groups.
    Whatever is patched into vLLM's classes for them is taken out again."""
    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    monkeypatch.setattr(EngineCore, "execute_dummy_batch", EngineCore.execute_dummy_batch)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    made = []

    def make(*connectors, groups=1):
        transfer = dict(connectors[0])
        if len(connectors) > 1:
            children = {"connectors": list(connectors)}
            transfer = {
                "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": children
            }  # fmt: skip
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
            ),
            kv_transfer_config=KVTransferConfig(**transfer),
        )
        config.cache_config.num_gpu_blocks = 40
        # Each group has another one: vLLM up to 0.28 makes no coordinator of groups that are alike.
        specs = [
            FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8 << g, dtype=torch.float32)
            for g in range(groups)
        ]
        cache = KVCacheConfig(40, [], [KVCacheGroupSpec([f"layer {g}"], spec) for g, spec in enumerate(specs)])
        core = EngineCore.__new__(EngineCore)
        core.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, hash_block_size=BLOCK, log_stats=False,
        )  # fmt: skip
        made.append(core)
        return core

    init_none_hash(sha256)
    yield make
    for core in made:
        core.scheduler.connector.shutdown()


def kvtier(core):
    """Our connector in it."""
    outer = core.scheduler.connector
    return next(each for each in getattr(outer, "_connectors", [outer]) if isinstance(each, ours.KVTierConnector))


def come(core):
    """A request comes, which vLLM refuses."""
    with pytest.raises(TypeError, match="request_id must be a string"):
        core.add_request(SimpleNamespace(request_id=7))


def test_engine_thread_without_loop_finds_scheduler_at_first_request(engine):
    cores = [engine(KVTIER), engine(KVTIER)]
    for core in cores:
        assert kvtier(core)._scheduler.engine_scheduler is None
    for core in cores:
        come(core)
        come(core)
        half = kvtier(core)._scheduler
        assert half.engine_scheduler is core.scheduler and half._engine.scheduler_lock.known
        half._engine.wake()  # there is no loop, and no queue


@pytest.mark.skipif(not granted(Feature.SYNC_LOADS), reason="this vLLM's forward waits for no load")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_output_of_a_step_that_waited_for_a_load_is_verified_before_it_is_read(engine, policy, groups):
    """By the scheduler that has this connector only. With "fail" vLLM ends requests whose loads failed: none is waited
    for."""
    options = {**KVTIER, "kv_connector_extra_config": {"store": "off", "kv_load_failure_policy": policy}}
    core, seen = engine(options, groups=groups), []
    half, scheduler = kvtier(core)._scheduler, core.scheduler
    half._sync_load.verify = lambda results, ranks: seen.append((results, ranks, half._engine.scheduler_lock._depth))
    assert half._sync_load._scheduler() is None, "nothing would be taken back"
    come(core)
    assert half._sync_load.possible == (policy == "recompute")
    assert half._sync_load._scheduler() is (scheduler if policy == "recompute" else None)
    good = LoadResult("r", set(), "", 1, 0.1, 0.0)
    for waited, report in ((False, None), (True, WorkerReport([good])), (True, None)):
        step = scheduler.schedule()
        step.has_sync_kv_loads = waited
        output = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
        output.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=report)
        scheduler.update_from_output(step, output)
    assert seen == ([([good], 1, 1), ([], 1, 1)] if policy == "recompute" else []), "under the scheduler lock"


def test_second_connector_of_one_engine_is_refused(engine):
    """In a MultiConnector. They would have one link: workers of both copy each block to the slot that one reserved, the
    later one perhaps after the first one's end, when the block was unpinned and has other content."""
    core = engine(KVTIER)
    first = kvtier(core)
    second = ours.KVTierConnector(first._vllm_config, KVConnectorRole.SCHEDULER, first._kv_cache_config)
    assert second._link == first._link
    with pytest.raises(ConfigError, match="one KVTierConnector"):
        second.bind_gpu_block_pool(core.scheduler.kv_cache_manager.block_pool)


def test_engine_without_directory_for_sockets_computes(engine, run_dir, monkeypatch, caplog):
    """As after `su` without `-`, where another user also made the directory among the temporary files."""
    (run_dir / f"kvtier-{os.getuid()}").write_text("")
    monkeypatch.setenv("TMPDIR", str(run_dir))
    core = engine({**KVTIER, "kv_connector_extra_config": {}})
    assert f"disabled ({run_dir}" in caplog.text
    connector, scheduler = kvtier(core), core.scheduler
    connector.register_kv_caches({})
    request = make_request("r", list(range(2 * BLOCK)), BLOCK)
    scheduler.add_request(request)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"r": 2 * BLOCK} and isinstance(output.kv_connector_metadata, StepMetadata)
    assert connector.request_finished_all_groups(request, ([1],)) == (False, None) and not connector.containment.errors


def test_engine_thread_with_loop_finds_scheduler_when_idle(engine):
    core = engine(KVTIER)
    proc = EngineCoreProc.__new__(EngineCoreProc)
    proc.scheduler, proc._idle_state_callbacks, proc.input_queue = core.scheduler, [], queue.Queue()
    proc._notify_idle_state_callbacks()
    assert kvtier(core)._scheduler.engine_scheduler is core.scheduler


def test_engine_thread_among_dummy_batches_does_what_is_due(engine):
    """A rank without requests, whose group has some, never comes to the hook before its sleep."""
    ran, batches, left = [], [], [False]
    thread = EngineThread(lambda: ran.append(1), Uncontained())
    proc = EngineCoreProc.__new__(EngineCoreProc)
    proc.scheduler, proc.input_queue = Mock(has_requests=lambda: left[0], spec=["has_requests"]), queue.Queue()
    proc.model_executor = SimpleNamespace(execute_dummy_batch=lambda: batches.append(len(ran)))

    def dummy():
        proc.execute_dummy_batch()
        return len(ran)

    assert [dummy(), dummy()] == [1, 1] and thread.scheduler is proc.scheduler
    thread.wake()
    assert [dummy(), dummy()] == [2, 2]
    thread.look_at(proc)  # a request comes
    left[0] = True  # it waits for a load
    assert dummy() == 2
    left[0] = False
    assert [dummy(), dummy()] == [3, 3] and batches == [0, 1, 1, 2, 2, 2, 3]


def test_engine_thread_error_is_not_retried_and_costs_no_request(engine, monkeypatch):
    core = engine(KVTIER)
    thread = kvtier(core)._scheduler._engine
    asked = []
    monkeypatch.setattr(EngineThread, "look_at", lambda self, engine: asked.append(self) or 1 / 0)
    come(core)
    come(core)
    assert asked.count(thread) == 1, "it is not tried again"


@pytest.mark.parametrize(("policy", "recomputes"), [("recompute", True), ("fail", False)])
def test_failure_policy_within_a_multi_connector_reaches_the_scheduler(engine, policy, recomputes):
    """The connector's own configuration is a copy there: until a request comes the scheduler goes by vLLM's default."""
    extra = {"kv_connector_extra_config": {"store": "off", "kv_load_failure_policy": policy}}
    core = engine({**KVTIER, **extra}, OTHER)
    assert not core.scheduler.recompute_kv_load_failures
    come(core)
    assert core.scheduler.recompute_kv_load_failures is recomputes


def test_failed_load_in_old_vllm_without_loop_marks_request(engine, monkeypatch):
    """Before 0.30, of models with several groups: we mark the request in vLLM's scheduler ourselves."""
    monkeypatch.setattr(ours, "TransferResults", None)
    core = engine(KVTIER, groups=2)
    connector, scheduler = kvtier(core), core.scheduler
    request = SimpleNamespace(
        request_id="r", is_finished=lambda: False, num_computed_tokens=64, status=RequestStatus.WAITING_FOR_REMOTE_KVS
    )
    scheduler.requests["r"] = request
    scheduler.requests["s"] = SimpleNamespace(request_id="s", num_computed_tokens=0, status=RequestStatus.PREEMPTED)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False), "no load whose failure would be lost"
    come(core)
    report = WorkerReport([LoadResult(name, {1}, "bad", 1, 0.1, 0.0) for name in ("r", "s")])  # a step waited for s
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set()))
    assert request.num_computed_tokens == 0 and scheduler.failed_recving_kv_req_ids == {"r"}
