"""Real engines shared by all tests of a session: a prefill engine and a decode engine with the connector, S without.

All use float32. The order of additions differs between prefill, decode and batches; in float32 it changes a logprob by
about 1e-5, so that a wrong token cannot hide behind rounding (see ``engine_client.assert_same``). Caches are small, so
that conversations evict each other and long answers preempt each other.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import model_shapes
import pytest
from engine_client import Driver, driving
from faults import VARIABLE, FaultFile
from zygote import OF_SESSION, Zygote

from vllm_kvtier.devtools.engines import COMMON_ENV, CPU_ENV, Engine, kvtier, proxy
from vllm_kvtier.devtools.processes import Service, free_port, kill_all, start_all, wait_all
from vllm_kvtier.vllm_compat.version import check_supported

# For engines that run classes of the tests: connectors that fail, a worker that sleeps.
TESTS = str(Path(__file__).parent)
TESTS_ON_PATH = {"PYTHONPATH": os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])}

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
    "store": "off",  # so that blocks are pulled, not loaded
}
# For engines whose peers die and stall: short timeouts, which tests can wait for.
SHORT = {
    **EXTRA,
    "handoff_seconds": 6.0,
    "retain_seconds": 6.0,
    "lease_seconds": 3.0,
    "lookup_timeout": 1.0,
    "handshake_timeout": 2.0,
    "transfer_timeout": 16.0,
}


class Fleet(NamedTuple):
    prefill: Engine
    decode: Engine
    single: Engine  # without a connector; its greedy answers are the reference


class Trio(NamedTuple):
    """Engines that tests kill and make faulty; ``strict`` fails a request whose pull failed."""

    prefill: Engine
    decode: Engine
    strict: Engine
    faults: dict[str, FaultFile]  # by the engine's name


@pytest.fixture(scope="session", autouse=True)
def zygote() -> Iterator[Zygote]:
    """Engines of this session start from a process that has imported vLLM, where they can."""
    of_all_workers = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    zygote = Zygote({**os.environ, **COMMON_ENV, **CPU_ENV, "HF_HUB_OFFLINE": "1"}, shared_as=of_all_workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OF_SESSION, zygote.shared_as)
        patch.setattr(Engine, "popen", staticmethod(zygote.popen))
        yield zygote
    zygote.close()


@pytest.fixture
def run_script(zygote, tmp_path) -> Callable[..., str]:
    """Runs a script that makes an engine in its own process. Returns its output; it must succeed."""

    def run(*argv: str, env: dict[str, str]) -> str:
        env = {**zygote.env, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **env}
        files = tmp_path / "stdout", tmp_path / "stderr"
        with files[0].open("wb") as stdout, files[1].open("wb") as stderr:
            process = zygote.start_script(argv, env, stdout, stderr)
        try:
            code = process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        output, errors = (file.read_text("utf-8", "replace") for file in files)
        assert code == 0, output[-3000:] + errors[-3000:]
        return output

    return run


@pytest.fixture(scope="session")
def model_path(demo_model, log_dir) -> Path:
    """A model with as much KV as the demo model, which computes it in half the time: two layers in place of six."""
    return model_shapes.write(model_shapes.TWO_LAYERS, log_dir / "models" / "two-layers", demo_model)


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory):
    """Where this session's engines log; pytest keeps the last three sessions' directories."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
def make_engine(model_path, log_dir, request) -> Iterator[Callable[..., Engine]]:
    """Makes engines for one test, not started; they are killed when the test ends.

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
    """S, not started: the first fixture that needs it starts it together with its own engines."""
    flags = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], *model_shapes.GPU_FLAGS)}
    engine = Engine(model_path, name="S", gpus=model_shapes.GPUS[:1], log_dir=log_dir, **flags)
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def single(plain) -> Engine:
    """S, a plain engine without a connector."""
    start_missing([plain])
    return plain


@pytest.fixture(scope="session")
def fleet(model_path, log_dir, plain) -> Iterator[Fleet]:
    """Tests leave these three running, and without exports after some time."""
    # From 0.32, vLLM serves /inference/v1/generate only with this flag, which older versions lack.
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
        kv = {**kvtier(extra), "kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty_connector"}
        plan = log_dir / f"{name}.faults"
        faults[name] = FaultFile(plan)
        # Some tests reset or pause an engine, which takes the development mode.
        env = {**TESTS_ON_PATH, VARIABLE: str(plan), "VLLM_SERVER_DEV_MODE": "1"}
        engines.append(Engine(model_path, name=name, kv=kv, log_dir=log_dir, env=env, **ENGINE_FLAGS))
    start_missing([*engines, plain])
    yield Trio(*engines, faults)
    kill_all(engines)


@pytest.fixture
async def trio(trio_of_session, trio_is_idle_afterwards, driver) -> AsyncIterator[Trio]:
    """Healthy for each test: no fault, no stopped engine, and dead engines are restarted."""
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
        if engine.running and engine.ready_after is not None:  # a restart loses the count
            assert (await driver.inspect(engine)).violations == 0


@pytest.fixture
async def driver(single) -> AsyncIterator[Driver]:
    async with driving(single) as driver:
        yield driver


@pytest.fixture
async def p_holds_nothing_yet(fleet, driver) -> None:
    """Wait until the exports of earlier tests have ended."""
    await driver.until_no_exports(fleet.prefill, HANDOFF_SECONDS + RETAIN_SECONDS)


# These two wait until all exports have expired: once a session, at its end.


@pytest.fixture(scope="session")
def fleet_is_idle_afterwards(fleet) -> Iterator[None]:
    """When all tests are over, every block of prefill and decode engines is free."""
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
