"""Real engines shared by a whole session's tests: P and D with the connector, S without, each started once.

All in float32: there the order of additions, which differs between a prefill, a decode step and another batch,
moves a logprob by about 1e-5, and so a wrong token cannot hide behind rounding (see ``drive.assert_same``).
Caches are small, so that conversations push each other out and long answers preempt each other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NamedTuple

import pytest
from drive import Driver, driving

from vllm_kvtier.devtools.engines import Engine, kvtier, proxy
from vllm_kvtier.devtools.faults import VARIABLE, FaultFile
from vllm_kvtier.devtools.processes import Service, free_port, kill_all, start_all, wait_all
from vllm_kvtier.vllm_compat.version import check_supported

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


def start_missing(engines: Iterable[Engine]) -> None:
    """Start those that do not run, together; return when all are ready."""
    engines = list(engines)
    start_all([engine for engine in engines if not engine.running])
    wait_all(engines)


@pytest.fixture(scope="session")
def plain(model_path, log_dir) -> Iterator[Engine]:
    """S, not started: whoever needs it first starts it together with its own."""
    engine = Engine(model_path, name="S", log_dir=log_dir, **ENGINE_FLAGS)
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def single(plain) -> Engine:
    """S, a plain engine without a connector."""
    start_missing([plain])
    return plain


@pytest.fixture(scope="session")
def fleet(model_path, log_dir, plain) -> Iterator[Fleet]:
    """Tests leave these three as they found them: running, and sooner or later holding nothing."""
    # Since 0.32 vLLM serves /inference/v1/generate only if it is told to; before, always, and it knows no such flag.
    scale_out = ("--enable-scale-out",) if check_supported() >= (0, 32, 0) else ()
    flags = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], *scale_out)}

    def engine(name: str) -> Engine:
        kv = kvtier({**EXTRA, "endpoint_port": free_port()})
        return Engine(model_path, name=name, kv=kv, log_dir=log_dir, **flags)

    fleet = Fleet(engine("P"), engine("D"), plain)
    start_missing(fleet)
    yield fleet
    kill_all(fleet[:2])


@pytest.fixture(scope="session")
def trio_of_session(model_path, log_dir, plain) -> Iterator[Trio]:
    faults, engines = {}, []
    for name, policy in (("FP", "recompute"), ("FD", "recompute"), ("FS", "fail")):
        extra = {**SHORT, "endpoint_port": free_port(), "kv_load_failure_policy": policy}
        module = "vllm_kvtier.devtools.faulty_connector"
        kv = {**kvtier(extra), "kv_connector": "FaultyConnector", "kv_connector_module_path": module}
        plan = log_dir / f"{name}.faults"
        faults[name] = FaultFile(plan)
        env = {VARIABLE: str(plan), "VLLM_SERVER_DEV_MODE": "1"}  # some are told to reset, or to pause
        engines.append(Engine(model_path, name=name, kv=kv, log_dir=log_dir, env=env, **ENGINE_FLAGS))
    start_missing([*engines, plain])
    yield Trio(*engines, faults)
    kill_all(engines)


@pytest.fixture
async def trio(trio_of_session, trio_is_idle_afterwards, driver) -> AsyncIterator[Trio]:
    """Whole again for each test: nothing is wrong, nobody is stopped, and who died is started anew."""
    trio = trio_of_session
    for faults in trio.faults.values():
        faults.set()
    start_missing(trio[:3])
    yield trio
    for faults in trio.faults.values():
        faults.set()
    for engine in trio[:3]:
        if engine.running:
            engine.resume()
        if engine.running and engine.ready_after is not None:  # its next life would not know
            assert (await driver.inspect(engine)).violations == 0


@pytest.fixture
async def driver(single) -> AsyncIterator[Driver]:
    async with driving(single) as driver:
        yield driver


@pytest.fixture
async def p_holds_nothing_yet(fleet, driver) -> None:
    """What an earlier test left there would be taken for this one's."""
    await driver.until_no_exports(fleet.prefill, HANDOFF_SECONDS + RETAIN_SECONDS)


# These two wait until the exports' time is over too: once a session, when it mostly is.


@pytest.fixture(scope="session")
def fleet_is_idle_afterwards(fleet) -> Iterator[None]:
    """When all tests are over, every block of P and D is free."""
    yield
    _until_idle(fleet.single, [fleet.prefill, fleet.decode], RETAIN_SECONDS)


@pytest.fixture(scope="session")
def trio_is_idle_afterwards(single, trio_of_session) -> Iterator[None]:
    yield
    engines = wait_all([engine for engine in trio_of_session[:3] if engine.running])
    _until_idle(single, engines, SHORT["lease_seconds"] + SHORT["retain_seconds"])


def _until_idle(single: Engine, engines: list[Engine], seconds: float) -> None:
    async def check() -> None:
        async with driving(single) as driver:
            await driver.until_idle(*engines, seconds=seconds + 5.0)

    asyncio.run(check())
