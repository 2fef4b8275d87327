"""Sleep mode: who is told that the cache's memory goes, in releases that tell their connector and in others."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from test_scheduler_half import half  # noqa: F401
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.vllm_compat import sleep
from vllm_kvtier.vllm_compat.facts import _unsupported
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
    monkeypatch.setattr(sleep, "_told_by_vllm", lambda: False)
    return FakeWorker


def config_of(worker="fake_vllm_worker.FakeWorker", **model):
    parallel = SimpleNamespace(worker_cls=worker, decode_context_parallel_size=1, prefill_context_parallel_size=1)
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(**model))


def test_worker_that_sleeps_tells_its_connector_before_the_memory_goes_and_when_it_is_back(worker):
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


def test_worker_of_a_vllm_that_tells_its_connector_is_left_alone(worker, monkeypatch):
    monkeypatch.setattr(sleep, "_told_by_vllm", lambda: True)
    before = dict(vars(worker))
    sleep.follow(config_of(), Follower(worker.log))
    assert dict(vars(worker)) == before


@pytest.mark.parametrize("real", [Worker, CPUWorker])
def test_this_vllm_can_be_followed(real):
    """Its methods are as they are expected to be, or it tells by itself."""
    assert sleep.untold(config_of(f"{real.__module__}.{real.__name__}")) is None


@pytest.mark.parametrize(
    "model, possible",
    [
        ({"enable_sleep_mode": False, "enable_cumem_allocator": False}, False),
        ({"enable_sleep_mode": True, "enable_cumem_allocator": False}, True),
        ({"enable_sleep_mode": False, "enable_cumem_allocator": True}, True),
    ],
)
def test_sleep_mode_of_a_worker_that_cannot_be_followed_is_refused(worker, model, possible):
    """But only where the memory may go at all."""
    assert sleep.possible(config_of(**model)) is possible
    caches = SimpleNamespace(kv_cache_groups=[])
    otherwise = _unsupported(config_of(**model), caches)
    assert otherwise == "this model keeps no KV"
    del worker.__mro__[1].wake_up
    reason = _unsupported(config_of(**model), caches)
    assert reason == otherwise if not possible else "FakeWorker has no wake_up(tags)" in reason


@pytest.fixture
def running(half):  # noqa: F811
    """A scheduler half of one rank whose endpoint is not open yet; ``awake`` is what its worker says when it is up."""
    nothing = SimpleNamespace(clear=lambda: None, drain=lambda: None)
    half._facts, half._config = SimpleNamespace(world_size=1, engine_id="e", unsupported=None), KVTierConfig()
    half._endpoint, half._sharing, half._tier, half._offloader = Endpoint([]), None, None, None
    half._reactor = SimpleNamespace(call_soon=lambda job: job())
    half._namespace, half._wire_codec, half.instance = NAMESPACE, "raw", "e/0"
    half._ranks, half._summed, half._wire_codecs = {}, {}, {}
    half._provenance = SimpleNamespace(weights_changing=lambda: None, weights_changed=lambda: None)
    half._exports = half._exporter = half._tables = nothing
    half._matcher.request_ids, half.reset = lambda: [], lambda: True
    half.awake = m.Register(SimpleNamespace(rank=0, agent="a", shared=None), "raw")
    return half


NAMESPACE = m.Namespace("model", "bf16", "sha256", "seed", 16, 1, 1)


def is_open(half) -> bool:  # noqa: F811
    assert (half._hello() is None) == (half._endpoint.unusable is not None)
    return half._endpoint.unusable is None


@pytest.mark.parametrize("change", ["_follow_weights", "_become_passive"])
@pytest.mark.parametrize("when", ["awake", "asleep", "before the workers are set up", "before the weights are known"])
def test_scheduler_half_refuses_for_good_whatever_follows(running, change, when):
    """A later sleep overwrote the reason, and waking up opened the endpoint again under the old weights' name."""
    if when == "before the weights are known":
        running._namespace = None
    if when != "before the workers are set up":
        running._heard(running.awake)
        assert is_open(running) == (running._namespace is not None)
    if when == "asleep":
        running._heard(m.Asleep(0))
    getattr(running, change)()
    assert not is_open(running)
    running._namespace = NAMESPACE
    running._open_if_ready()
    for message in (running.awake, m.Asleep(0), running.awake, m.Unusable(0, "no NIXL"), m.Asleep(0), running.awake):
        running._heard(message)
        assert not is_open(running) and running._endpoint.unusable == running._refused


def test_scheduler_half_whose_weights_an_option_names_opens_after_they_were_changed(running):
    running._config = KVTierConfig(model_fingerprint="mine")
    running._heard(running.awake)
    running._follow_weights()
    running._heard(m.Asleep(0))
    running._follow_weights()
    assert not is_open(running)
    running._heard(running.awake)
    assert is_open(running)


def test_scheduler_half_whose_worker_could_not_be_set_up_opens_when_it_can(running):
    """As after a sleep, when there is memory for it."""
    running._heard(m.Unusable(0, "no memory"))
    assert not is_open(running)
    running._heard(m.Asleep(0))
    running._heard(running.awake)
    assert is_open(running)


def test_scheduler_half_opens_as_another_instance_when_every_rank_is_back(half):  # noqa: F811
    log = []
    half._facts = SimpleNamespace(world_size=2, engine_id="e")
    half._endpoint = Endpoint(log)
    half._sharing = SimpleNamespace(leave=lambda: log.append("leave"))
    half._namespace, half._tier, half._ranks, half._summed, half._wire_codecs = object(), None, {}, {}, {}
    half._wire_codec, half.instance = "raw", "e/0"

    def register(rank, agent):
        info = SimpleNamespace(rank=rank, agent=agent, shared=None)
        half._heard(m.Register(info))

    register(0, "a")
    register(1, "b")
    assert log == [("e/0", ["a", "b"])]
    log.clear()
    half._heard(m.Asleep(0))
    register(0, "a.2")  # the other rank has not said yet that it slept
    half._heard(m.Asleep(1))
    assert log.count("close") == 2 and not any(isinstance(entry, tuple) for entry in log), "one rank's memory is gone"
    register(1, "b.2")
    instance, agents = log[-1]
    assert agents == ["a.2", "b.2"] and instance != "e/0" and instance == half._matcher.nearby.instance
