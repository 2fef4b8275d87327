"""Sleep mode: which side learns that the cache's memory goes, in releases that tell their connector and in others."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from source_fakes import bare_identity
from test_connector_scheduler import half  # noqa: F401
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.peer_access import PeerAccess
from vllm_kvtier.vllm_compat import sleep
from vllm_kvtier.vllm_compat.engine_info import _unsupported
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m


class Follower:
    def __init__(self, log):
        self.log = log

    def unregister_kv_caches(self):
        self.log.append("unregister")

    def restore_kv_caches(self):
        self.log.append("restore")


class Endpoint:
    host, port, unusable = "h", 1, "starting"

    def __init__(self, log):
        self.log = log

    def open(self, namespace, welcome):
        self.unusable = None
        self.log.append((welcome.instance, [info.agent for info in welcome.ranks]))

    def close(self, reason):
        self.unusable = reason
        self.log.append("close")


@pytest.fixture
def worker(monkeypatch):
    """A worker of vLLM 0.31 or 0.32, whose methods write what they do into ``log``."""

    class Base:
        def sleep(self, level: int = 1) -> None:
            self.log.append(f"sleep {level}")

        def wake_up(self, tags: list[str] | None = None) -> None:
            self.log.append(f"wake_up {tags}")

        def discard(self, tags: tuple[str, ...]) -> None:
            self.log.append(f"discard {tags}")

    class FakeWorker(Base):
        log: list[str] = []

    FakeWorker.log = []
    module = ModuleType("fake_vllm_worker")
    module.FakeWorker = FakeWorker
    monkeypatch.setitem(sys.modules, "fake_vllm_worker", module)
    monkeypatch.setattr(sleep, "_vllm_notifies", lambda: False)
    return FakeWorker


def config_of(worker="fake_vllm_worker.FakeWorker", **model):
    parallel = SimpleNamespace(worker_cls=worker, decode_context_parallel_size=1, prefill_context_parallel_size=1)
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(**model))


def test_worker_sleep_and_wake_are_reported_to_connector(worker):
    follower = Follower(worker.log)
    for _ in range(2):  # tensor parallel ranks of one process, or a second engine: wrapped once
        sleep.follow(config_of(), follower)
    engine = worker()
    engine.sleep(level=2)
    engine.wake_up(tags=["weights"])
    engine.wake_up(tags=["kv_cache"])
    engine.discard(("kv_cache",))
    engine.wake_up()
    engine.discard(("weights",))
    assert worker.log == [
        "unregister", "sleep 2", "wake_up ['weights']", "wake_up ['kv_cache']", "restore",
        "unregister", "discard ('kv_cache',)", "wake_up None", "restore", "discard ('weights',)",
    ]  # fmt: skip
    worker.log.clear()
    del follower
    engine.sleep()
    assert worker.log == ["sleep 1"], "a connector that is gone is not kept"


def test_worker_hook_skips_vllm_with_own_notification(worker, monkeypatch):
    monkeypatch.setattr(sleep, "_vllm_notifies", lambda: True)
    before = dict(vars(worker))
    sleep.follow(config_of(), Follower(worker.log))
    assert dict(vars(worker)) == before


@pytest.mark.parametrize("real", [Worker, CPUWorker])
def test_sleep_of_installed_vllm_is_supported(real):
    """Its methods are as they are expected to be, or it tells by itself."""
    assert sleep.unsupported_reason(config_of(f"{real.__module__}.{real.__name__}")) is None


@pytest.mark.parametrize(
    "model, possible",
    [
        ({"enable_sleep_mode": False, "enable_cumem_allocator": False}, False),
        ({"enable_sleep_mode": True, "enable_cumem_allocator": False}, True),
        ({"enable_sleep_mode": False, "enable_cumem_allocator": True}, True),
    ],
)
def test_sleep_mode_of_unknown_worker_is_unsupported(worker, model, possible):
    """But only where the memory may go at all."""
    assert sleep.possible(config_of(**model)) is possible
    caches = SimpleNamespace(kv_cache_groups=[])
    otherwise = _unsupported(config_of(**model), caches)
    assert otherwise == "this model has no KV cache"
    del worker.__mro__[1].wake_up
    reason = _unsupported(config_of(**model), caches)
    assert reason == otherwise if not possible else "FakeWorker has no wake_up(tags)" in reason


@pytest.fixture
def running(half):  # noqa: F811
    """A scheduler side of one rank whose endpoint is not open yet; ``awake`` is what its worker says when it is up."""
    nothing = SimpleNamespace(clear=lambda: None, drain=lambda: None)
    half._info, half._config = SimpleNamespace(world_size=1, engine_id="e", unsupported=None), KVTierConfig()
    half._sharing = half._store = half._offloader = None
    half._identity, half._endpoint = bare_identity(namespace=NAMESPACE), Endpoint([])
    half._access = access_of(half._identity, half._endpoint)
    half._provenance = SimpleNamespace(weights_changing=lambda: None, weights_changed=lambda: None)
    half._exports = half._exporter = half._tables = nothing
    half._clearing = ChecksumClearing(lambda message: None)
    half._matcher.request_ids, half.reset = list, lambda: True
    half.awake = lm.Register(SimpleNamespace(rank=0, agent="a", shared=None), "raw")
    return half


NAMESPACE = m.Namespace("model", "bf16", "sha256", "seed", 16, 1, 1)


def access_of(identity, endpoint, world_size=1, sharing=None):
    reactor = SimpleNamespace(call_soon=lambda job: job())
    info = SimpleNamespace(world_size=world_size, engine_id="e")
    engine = SimpleNamespace(reactor=reactor, info=info, identity=identity)
    return PeerAccess(engine, endpoint, None, None, sharing, ChecksumClearing(lambda message: None))


def is_open(half) -> bool:  # noqa: F811
    assert (half._access.hello() is None) == (half._endpoint.unusable is not None)
    return half._endpoint.unusable is None


@pytest.mark.parametrize("change", ["_follow_weights", "_become_passive"])
@pytest.mark.parametrize("when", ["awake", "asleep", "before the workers are set up", "before the weights are known"])
def test_connector_scheduler_refusal_is_permanent(running, change, when):
    """A later sleep overwrote the reason, and waking up opened the endpoint again under the old weights' name."""
    if when == "before the weights are known":
        running._identity.namespace = None
    if when != "before the workers are set up":
        running._access.on_message(running.awake)
        assert is_open(running) == (running._identity.namespace is not None)
    if when == "asleep":
        running._access.on_message(lm.Asleep(0))
    getattr(running, change)()
    assert not is_open(running)
    running._identity.namespace = NAMESPACE
    running._access.open_if_ready()
    for message in (running.awake, lm.Asleep(0), running.awake, lm.Unusable(0, "no NIXL"), lm.Asleep(0), running.awake):
        running._access.on_message(message)
        assert not is_open(running) and running._endpoint.unusable == running._access.refused


def test_disabled_connector_clears_checksums_before_blocks_get_other_content(running):
    done = []
    running._exports = SimpleNamespace(clear=lambda: done.append("exports end"))
    running._clearing = ChecksumClearing(lambda message: done.append("checksums are cleared"))
    running._exporter = SimpleNamespace(drain=lambda: done.append("blocks are free"))
    running._become_passive()
    assert done == ["exports end", "checksums are cleared", "blocks are free"]


def test_connector_scheduler_with_fingerprint_option_reopens_after_change(running):
    running._config = KVTierConfig(model_fingerprint="mine")
    running._access.on_message(running.awake)
    running._follow_weights()
    running._access.on_message(lm.Asleep(0))
    running._follow_weights()
    assert not is_open(running)
    running._access.on_message(running.awake)
    assert is_open(running)


def test_connector_scheduler_opens_when_worker_setup_succeeds_later(running):
    """As after a sleep, when there is memory for it."""
    running._access.on_message(lm.Unusable(0, "no memory"))
    assert not is_open(running)
    running._access.on_message(lm.Asleep(0))
    running._access.on_message(running.awake)
    assert is_open(running)


def test_connector_scheduler_reopens_as_new_instance_after_all_ranks_wake():
    log, identity = [], bare_identity(namespace=SimpleNamespace(hash_block_size=16))
    access = access_of(identity, Endpoint(log), 2, SimpleNamespace(leave=lambda: log.append("leave")))

    def register(rank, agent):
        info = SimpleNamespace(rank=rank, agent=agent, shared=None)
        access.on_message(lm.Register(info))

    register(0, "a")
    register(1, "b")
    assert log == [("e/0", ["a", "b"])]
    log.clear()
    access.on_message(lm.Asleep(0))
    register(0, "a.2")  # the other rank has not reported its sleep yet
    access.on_message(lm.Asleep(1))
    assert log.count("close") == 2 and not any(isinstance(entry, tuple) for entry in log), "one rank's memory is gone"
    register(1, "b.2")
    instance, agents = log[-1]
    assert agents == ["a.2", "b.2"] and instance != "e/0" and instance == identity.instance
