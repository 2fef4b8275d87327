"""Each kind of KV cache group on a GPU, also those whose kernels need one: stored and loaded, and handed off.

    KVTIER_TEST_GPUS=0 python -m pytest tests/engines/test_gpu_kinds.py

With KVTIER_TEST_SYNC_LOADS=1 loads are synchronous where they can be. Nothing is altered then, since what is loaded
within a step is used before it could be.

The models are tiny and their answers depend on all of their history (``tiny_models``). Three engines a kind: one with a
node store, which is also the prefill engine, a decode engine, and a plain one, whose answers are right. All kinds'
engines start at once, and a kind that does not start fails alone. Skipped is one whose kernels are in a package that
this machine lacks. Each kind has negative controls: zeroed or exchanged blocks of one group, changed after their
checksums were found right, change the answers. Flipped bits, clients that leave and a killed store do not.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
from engine_client import Reply, driving, off, random_tokens
from engine_fixtures import TESTS_ON_PATH
from faults import ALTER, altered
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, NodeStore, runtime_dir, seeded, store_env, store_in

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

pytestmark = pytest.mark.skipif(not GPUS, reason="KVTIER_TEST_GPUS names no device")

SYNC_LOADS = os.environ.get("KVTIER_TEST_SYNC_LOADS") == "1"
ANSWER = 8  # tokens
# Not where a chunk of ``tiny_models`` begins, behind which local attention needs nothing.
LENGTH = 7 * tiny_models.CHUNK + 76


class Kind(NamedTuple):
    """``block``: as the flag, tokens; vLLM makes it larger where states need that. ``tolerance``: of logprobs, which
    kernels and batches move. ``length``: of prompts, at which an index does not choose yet; where it does, a plain
    engine's answers to one prompt differ, because near ties are chosen by rounding. ``index``: a group of its own.
    ``packages``: vLLM's model needs them; some are in vLLM's own folder."""

    block: int
    flags: tuple[str, ...]
    tolerance: float = 2e-2
    length: int = LENGTH
    index: int | None = None
    packages: tuple[str, ...] = ()

    @property
    def lacking(self) -> list[str]:
        vllm = Path(find_spec("vllm").origin).parent
        folders = [str(vllm), str(vllm / "third_party")]
        return [name for name in self.packages if not (find_spec(name) or PathFinder.find_spec(name, folders))]


FLOAT32, BF16 = ("--dtype", "float32"), ("--dtype", "bfloat16")
KINDS = {
    "chunked": Kind(64, FLOAT32),
    # Its other backends come in packages of their own.
    "gdn": Kind(16, (*BF16, "--gdn-prefill-backend", "triton"), 0.3),
    "mamba2": Kind(16, FLOAT32),
    "mamba2-only": Kind(16, (*FLOAT32, "--enable-prefix-caching")),
    "mamba1": Kind(16, (*BF16, "--enable-prefix-caching"), 0.3),
    "short-conv": Kind(16, BF16, 0.3),
    "kda": Kind(64, (*BF16, "--enable-prefix-caching"), 0.3, packages=("_flashkda_C", "cutlass")),
    "swa-sink": Kind(16, BF16, 0.5),
    "mla": Kind(64, BF16, 0.3),
    "mla-sparse": Kind(64, BF16, 0.3, 4 * tiny_models.CHUNK, packages=("deep_gemm", "cutlass")),
    "swa-mla": Kind(256, BF16, 0.3, index=4, packages=("deep_gemm", "_flashmla_C", "tilelang", "cutlass")),
}
READY = 300  # seconds; all kinds' engines compile their kernels at once


class Trio(NamedTuple):
    """``plan``: of ``altering_connector``."""

    kind: Kind
    engine: Engine
    decode: Engine
    plain: Engine
    plan: Path

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.plain, self.engine, self.decode

    def plans(self, *hows: str) -> Iterator[str]:
        """Nothing is altered first and last. How many groups there are is known when something was loaded."""
        yield ""
        groups = int(Path(f"{self.plan}.groups").read_text())
        yield from (f"{how} {group}" for how in hows for group in range(groups))
        yield "again"

    def altered(self, plan: str) -> AbstractContextManager[None]:
        return altered(self.plan, plan)


class Trios(NamedTuple):
    """``failed``: what went wrong with a kind's model or one of its engines."""

    made: dict[str, Trio]
    failed: dict[str, str]
    store: NodeStore


@pytest.fixture(scope="module")
def trios(request, model_path, log_dir):
    wanted = sorted({item.callspec.params["kind"] for item in request.session.items if item.path == request.path})
    wanted = [name for name in wanted if not KINDS[name].lacking]
    with runtime_dir() as folder:
        trios = Trios({}, {}, store_in(folder))
        try:
            for number, name in enumerate(wanted):
                try:
                    model = tiny_models.build(name, log_dir / "models" / name, model_path)
                except Exception as error:  # of an older or newer transformers: the other kinds go on
                    trios.failed[name] = f"transformers makes no such model: {error!r}"
                    continue
                gpu, plan = GPUS[number % len(GPUS)], log_dir / f"{name}.alter"
                trios.made[name] = trio(KINDS[name], name, model, plan, folder, log_dir, gpu)
                for each in trios.made[name].engines:
                    each.start()
            with ThreadPoolExecutor(len(KINDS)) as pool:
                list(pool.map(lambda name: until_up(name, trios), list(trios.made)))
            yield trios
        finally:
            kill_all(each for trio in trios.made.values() for each in trio.engines)


def trio(kind: Kind, name: str, model: Path, plan: Path, folder: Path, log_dir: Path, gpu: int) -> Trio:
    plan.write_text("")

    def engine(role: str, options: dict | None) -> Engine:
        kv = None
        if options is not None:
            extra = {**OPTIONS, "store_size": "2GiB", "load_policy": "always", "endpoint_port": free_port()}
            extra |= {"lookup_timeout": 10, "handshake_timeout": 30, "handoff_seconds": 60, "retain_seconds": 2}
            extra |= {"sync_load_ms": 1000 if SYNC_LOADS else 0, "pull_threshold": 1}
            named = {"kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"}
            kv = {**kvtier({**extra, **options}), **named}
        return Engine(
            model, name=f"{name}-{role}", kv=kv, block_size=kind.block, args=(*kind.flags, *GPU_FLAGS),
            log_dir=log_dir, gpus=[gpu], env={**store_env(folder), **TESTS_ON_PATH, ALTER: str(plan)},
            kv_cache_bytes=512 << 20, ready_seconds=READY,
        )  # fmt: skip

    return Trio(kind, engine("store", {}), engine("decode", {"store": "off"}), engine("plain", None), plan)


def until_up(name: str, trios: Trios) -> None:
    """Ready, and kernels compiled; or the kind's engines are killed, and why is known."""
    trio = trios.made[name]
    for each in trio.engines:
        try:
            each.wait_ready()
            asyncio.run(warmed(each))
        except Exception as error:  # whatever it is: the other kinds go on
            trios.failed[name] = f"{each.name}: {error!r}\n{each.log_tail(30)}"
            kill_all(trio.engines)
            return


async def warmed(engine: Engine) -> None:
    rng = seeded(f"warm {engine.name}")
    async with driving(engine, NodeDriver) as driver:
        for length in (LENGTH, 40):
            await driver.ask(engine, random_tokens(rng, length), 3)
        await asyncio.gather(*(driver.ask(engine, random_tokens(rng, LENGTH - i), 3) for i in range(3)))


@pytest.fixture
def of(trios: Trios, kind: str) -> Trio:
    if lacking := KINDS[kind].lacking:
        pytest.skip(f"vLLM needs packages that are not installed: {', '.join(lacking)}")
    if kind in trios.failed:
        pytest.fail(trios.failed[kind][-4000:])
    return trios.made[kind]


@pytest.fixture
async def driver(trios: Trios, of: Trio):
    async with driving(of.plain, NodeDriver) as driver:
        driver.node = Node(of.engine, of.engine, of.plain, trios.store, {})
        yield driver


def right(got: Reply, want: Reply, kind: Kind, what: object, others: bool = False) -> None:
    """``others``: they were in its batch, and none in the truth's."""
    tolerance = (1 + others) * kind.tolerance
    assert off(got, want, tolerance) < tolerance, (what, got.report)


async def known(driver: NodeDriver, engine: Engine, prompt: list[int]) -> int:
    """Computed; stored as far as it will be; and in the GPU's prefix cache no more. Returns the tokens stored."""
    await driver.ask(engine, prompt, 1)
    await driver.until_idle(engine)
    stored = -1

    async def still() -> bool:
        nonlocal stored
        before, stored = stored, (await driver.query(engine, prompt)).stored
        await driver.flushed(engine)
        return stored == before > 0

    await driver.until(still, 20, f"{len(prompt)} tokens are stored")
    await driver.reset(engine)
    return stored


async def certain(driver: NodeDriver, kind: Kind, rng, length: int) -> list[int]:
    """A prompt whose answer does not begin with a tie, behind which ``off`` compares nothing."""
    for _ in range(50):
        prompt = random_tokens(rng, length)
        (best,) = (await driver.truth(prompt, 1)).top
        if best[0] - best[1] > 2 * kind.tolerance:
            return prompt
    raise AssertionError("all answers are ties")


def compared(moved: dict[str, float], plan: str, reply: Reply, want: Reply, kind: Kind) -> Reply:
    """Notes how far the answer is off. Returns what to compare the next one with: the same engine's when nothing was
    altered, where rounding is the same."""
    moved[plan] = off(reply, want, kind.tolerance)
    return want if plan else reply


def noticed(moved: dict[str, float], kind: Kind) -> bool:
    """All that was altered, and nothing else: further off than the same engine's answers without are."""
    altered = {plan for plan, far in moved.items() if plan and far > max(kind.tolerance / 30, 3 * moved["again"])}
    expected = {plan for plan in moved if " " in plan and not plan.endswith(f" {kind.index}")}
    return moved[""] < kind.tolerance and altered == expected


@pytest.mark.parametrize("kind", KINDS)
async def test_gpu_kind_is_loaded_from_the_store(of: Trio, kind, driver):
    """Conversations that grow, several at once, one edited and one left by its client, with the GPU's prefix cache
    emptied between their turns."""
    rng = seeded(f"conversations {kind}")
    stem, loaded = random_tokens(rng, of.kind.length), 0
    failures = await driver.kvtier(of.engine, "integrity_failures")
    conversations = [stem + random_tokens(rng, rng.randrange(1, 500)) for _ in range(3)]
    for turn in range(3):
        left = driver.disconnect(of.engine, conversations[turn] + [300 + turn], 0.05, ASKED)
        asked = [driver.ask(of.engine, each, ANSWER, ASKED) for each in conversations]
        *replies, _ = await asyncio.gather(*asked, left)
        for i, reply in enumerate(replies):
            want = await driver.truth(conversations[i], ANSWER)
            right(reply, want, of.kind, (turn, len(conversations[i])), others=True)
            loaded += reply.pulled
            conversations[i] = conversations[i] + reply.tokens + random_tokens(rng, rng.randrange(1, 300))
        at = rng.randrange(len(stem), len(conversations[turn]))
        conversations[turn] = conversations[turn][:at] + random_tokens(rng, rng.randrange(1, 300))
        await driver.until_idle(of.engine)
        await driver.reset(of.engine)
    # Alone: together they wait for each other, and load asynchronously.
    reply = await driver.ask(of.engine, conversations[0], ANSWER, ASKED)
    right(reply, await driver.truth(conversations[0], ANSWER), of.kind, "alone")
    await driver.flushed(of.engine)
    counters = await driver.counters(of.engine)
    print(json.dumps({"kind": kind, "loaded": loaded, "counters": counters}))
    assert loaded > len(stem)
    assert bool(counters.get("synchronous_loads ok")) is SYNC_LOADS
    assert await driver.kvtier(of.engine, "integrity_failures") == failures


@pytest.mark.parametrize("kind", KINDS)
async def test_gpu_kind_is_handed_off(of: Trio, kind, driver):
    """From the prefill to the decode engine, whose own prefix cache has some of it from the second turn on."""
    rng = seeded(f"hand-offs {kind}")
    prompt, pulled = random_tokens(rng, 700), []
    for turn in range(3):
        _, reply = await driver.hand_off(of.engine, of.decode, prompt, ANSWER)
        right(reply, await driver.truth(prompt, ANSWER), of.kind, turn)
        pulled.append(reply.pulled)
        prompt = prompt + reply.tokens + random_tokens(rng, 300)
    print(json.dumps({"kind": kind, "handed_off": pulled}))
    assert await driver.kvtier(of.decode, "integrity_failures") == 0
    assert min(pulled) > 0, pulled


no_sync_loads = pytest.mark.skipif(SYNC_LOADS, reason="what a step loads is used before it could be altered")


@no_sync_loads
@pytest.mark.parametrize("kind", KINDS)
async def test_gpu_kind_altered_blocks_of_any_group_change_the_answer(of: Trio, kind, driver):
    """Or the conversations prove nothing."""
    rng = seeded(f"altered {kind}")
    # Two tokens behind what is loaded: a state that was altered long before is forgotten.
    length = 2 + await known(driver, of.engine, random_tokens(rng, LENGTH))
    prompt, other = [await certain(driver, of.kind, rng, length) for _ in range(2)]
    for each in (prompt, other):
        await known(driver, of.engine, each)
    want, moved = await driver.truth(prompt, ANSWER), {}
    for plan in of.plans("zero", "exchange"):
        assert (await driver.ask(of.engine, other, 1, ASKED)).pulled > 0
        with of.altered(plan):
            reply = await driver.ask(of.engine, prompt, ANSWER, ASKED)
        assert reply.pulled > 0, reply.report
        want = compared(moved, plan, reply, want, of.kind)
        await driver.until_idle(of.engine)
        await driver.reset(of.engine)
    print(json.dumps({"kind": kind, "loads altered": {plan: round(each, 4) for plan, each in moved.items()}}))
    assert noticed(moved, of.kind), moved


@no_sync_loads
@pytest.mark.parametrize("kind", KINDS)
async def test_gpu_kind_altered_blocks_of_a_hand_off_change_the_answer(of: Trio, kind, driver):
    rng = seeded(f"altered hand-off {kind}")
    prompt = await certain(driver, of.kind, rng, LENGTH)
    want, moved = await driver.truth(prompt, ANSWER), {}
    for plan in of.plans("zero"):
        first = await driver.prefill(of.engine, prompt)
        with of.altered(plan):
            reply = await driver.ask(of.decode, prompt, ANSWER, first.params)
        assert reply.pulled > 0, reply.report
        want = compared(moved, plan, reply, want, of.kind)
        await driver.reset(of.decode)
    print(json.dumps({"kind": kind, "hand-offs altered": {plan: round(each, 4) for plan, each in moved.items()}}))
    assert noticed(moved, of.kind), moved


@pytest.mark.parametrize("kind", KINDS)
async def test_gpu_kind_flipped_bits_are_found_and_recomputed(of: Trio, trios: Trios, kind, driver):
    """In every page of the store."""
    rng = seeded(f"flips {kind}")
    prompt = random_tokens(rng, LENGTH)
    want = await driver.truth(prompt, ANSWER)
    await asyncio.to_thread(trios.store.clear)
    await known(driver, of.engine, prompt)
    before = await driver.kvtier(of.engine, "integrity_failures")
    with trios.store.memory() as memory:
        for page in memory.written():
            memory.flip(rng, page)
    reply = await driver.ask(of.engine, prompt, ANSWER, ASKED)
    assert reply.pulled == 0, reply.report
    right(reply, want, of.kind, "flipped")
    await driver.flushed(of.engine)
    assert await driver.kvtier(of.engine, "integrity_failures") > before
    await asyncio.to_thread(trios.store.clear)


@pytest.mark.parametrize("kind", KINDS)
async def test_gpu_kind_survives_a_killed_store(of: Trio, trios: Trios, kind, driver):
    """While it loads. It answers on, and nothing stays held."""
    rng = seeded(f"killed {kind}")
    prompts = [random_tokens(rng, LENGTH + 50 * i) for i in range(3)]
    wants = [await driver.truth(prompt, ANSWER) for prompt in prompts]
    await asyncio.to_thread(trios.store.until_up)
    for prompt in prompts:
        await driver.ask(of.engine, prompt, 1)
    await driver.until_idle(of.engine)
    await driver.reset(of.engine)
    asked = [asyncio.create_task(driver.ask(of.engine, prompt, ANSWER, ASKED)) for prompt in prompts]
    await asyncio.to_thread(trios.store.kill)
    for reply, want in zip(await asyncio.gather(*asked), wants, strict=True):
        right(reply, want, of.kind, "killed", others=True)
    await asyncio.to_thread(trios.store.until_up)
    await driver.until_idle(of.engine)
