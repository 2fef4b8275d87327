"""Real engines shared by a whole session's tests: P and D with the connector, S without, started together once.

All in float32: there the order of additions, which differs between a prefill, a decode step and another batch,
moves a logprob by about 1e-5, and so a wrong token cannot hide behind rounding (see ``drive.assert_same``).
Caches are small, so that conversations push each other out and long answers preempt each other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import pytest
from drive import Driver, driving

from vllm_kvtier.devtools.engines import Engine, kvtier, proxy
from vllm_kvtier.devtools.faults import VARIABLE, FaultFile
from vllm_kvtier.devtools.processes import Service, free_port, kill_all, start_all

BLOCK = 32  # the CPU build's kernels want multiples of it
MAX_LENGTH = 3328  # 104 blocks
NUM_BLOCKS = 140
HANDOFF_SECONDS = 8.0
RETAIN_SECONDS = 12.0
THRESHOLD = 16
ENGINE_FLAGS = {
    "max_model_len": MAX_LENGTH,
    "num_blocks": NUM_BLOCKS,
    "block_size": BLOCK,
    "kv_cache_bytes": 128 << 20,
    "args": ("--dtype", "float32"),
}
EXTRA = {
    "bidirectional": True,
    "pull_threshold": THRESHOLD,
    "handoff_seconds": HANDOFF_SECONDS,
    "retain_seconds": RETAIN_SECONDS,
    "retain_share": 0.5,
    "store": "off",  # or it would have what these tests want to be pulled
}
# For engines whose peers die and stall: every wait is short, so that it can be measured.
SHORT = {
    **EXTRA,
    "handoff_seconds": 6.0,
    "retain_seconds": 6.0,
    "lease_seconds": 3.0,
    "ask_timeout": 1.0,
    "handshake_timeout": 2.0,
    "transfer_timeout": 16.0,
}


class Fleet(NamedTuple):
    prefill: Engine
    decode: Engine
    single: Engine  # without a connector: what it answers greedily is right


class Trio(NamedTuple):
    """Engines that die and misbehave; ``strict`` fails a request whose pull failed."""

    prefill: Engine
    decode: Engine
    strict: Engine
    faults: dict[str, FaultFile]  # by the engine's name


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory):
    """Where this session's engines log; pytest keeps the last three sessions' directories."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
def make_engine(model_path, log_dir, request) -> Iterator[Callable[..., Engine]]:
    """Makes engines of this test's own, not started; they are killed when the test ends, whatever it did.

    Options as Engine's; ``extra`` is short for ``kv=kvtier(extra)`` on a fixed free port.
    """
    made: list[Engine] = []

    def make(name: str = "engine", extra: dict | None = None, **options) -> Engine:
        if extra is not None:
            options["kv"] = kvtier({"endpoint_port": free_port(), **extra})
        name = f"{request.node.name}-{name}".replace("/", "_")
        made.append(Engine(options.pop("model", model_path), name=name, log_dir=log_dir, **options))
        return made[-1]

    yield make
    kill_all(made)


@pytest.fixture
def make_proxy(log_dir, request) -> Iterator[Callable[..., Service]]:
    """Makes proxies over engines, not started; they are killed when the test ends."""
    made: list[Service] = []

    def make(prefill: list[Engine], decode: list[Engine], name: str = "proxy", **options) -> Service:
        name = f"{request.node.name}-{name}".replace("/", "_")
        made.append(proxy(prefill, decode, name=name, log_dir=log_dir, **options))
        return made[-1]

    yield make
    kill_all(made)


@pytest.fixture(scope="session")
def fleet(model_path, log_dir) -> Iterator[Fleet]:
    """Tests leave these three as they found them: running, and sooner or later holding nothing."""

    def engine(name: str, kv: dict | None) -> Engine:
        return Engine(model_path, name=name, kv=kv, log_dir=log_dir, **ENGINE_FLAGS)

    engines = [engine(name, kvtier({**EXTRA, "endpoint_port": free_port()})) for name in ("P", "D")]
    engines.append(engine("S", None))
    start_all(engines)
    yield Fleet(*engines)
    kill_all(engines)


@pytest.fixture(scope="session")
def single(fleet) -> Engine:
    """A plain engine without a connector."""
    return fleet.single


@pytest.fixture(scope="session")
def trio_of_session(model_path, log_dir) -> Iterator[Trio]:
    faults, engines = {}, []
    for name, policy in (("FP", "recompute"), ("FD", "recompute"), ("FS", "fail")):
        extra = {**SHORT, "endpoint_port": free_port(), "kv_load_failure_policy": policy}
        module = "vllm_kvtier.devtools.faulty_connector"
        kv = {**kvtier(extra), "kv_connector": "FaultyConnector", "kv_connector_module_path": module}
        plan = log_dir / f"{name}.faults"
        faults[name] = FaultFile(plan)
        env = {VARIABLE: str(plan)}
        engines.append(Engine(model_path, name=name, kv=kv, log_dir=log_dir, env=env, **ENGINE_FLAGS))
    start_all(engines)
    yield Trio(*engines, faults)
    kill_all(engines)


@pytest.fixture
def trio(trio_of_session, trio_is_idle_afterwards) -> Iterator[Trio]:
    """Whole again for each test: nothing is wrong, nobody is stopped, and who died is started anew."""
    trio = trio_of_session
    for faults in trio.faults.values():
        faults.set()
    start_all([engine for engine in trio[:3] if not engine.running])
    yield trio
    for faults in trio.faults.values():
        faults.set()
    for engine in trio[:3]:
        if engine.running:
            engine.resume()


@pytest.fixture
async def driver(single) -> AsyncIterator[Driver]:
    async with driving(single) as driver:
        yield driver


@pytest.fixture(scope="module")
def fleet_is_idle_afterwards(fleet) -> Iterator[None]:
    """When a module's tests are over and the exports' time too, every block of P and D is free."""
    yield
    _until_idle(fleet.single, [fleet.prefill, fleet.decode], RETAIN_SECONDS)


@pytest.fixture(scope="module")
def trio_is_idle_afterwards(fleet, trio_of_session) -> Iterator[None]:
    yield
    engines = [engine for engine in trio_of_session[:3] if engine.running]
    _until_idle(fleet.single, engines, SHORT["lease_seconds"] + SHORT["retain_seconds"])


def _until_idle(single: Engine, engines: list[Engine], seconds: float) -> None:
    async def check() -> None:
        async with driving(single) as driver:
            await driver.until_idle(*engines, seconds=seconds + 5.0)

    asyncio.run(check())
