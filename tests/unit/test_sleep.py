"""Sleep mode: who is told that the cache's memory goes, in releases that tell their connector and in others."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from test_scheduler_half import half  # noqa: F401
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

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
