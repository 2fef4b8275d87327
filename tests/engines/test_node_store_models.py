"""The store keeps every kind of KV cache: windows, MLA, fp8, two ranks, a codec by kind; in blocks of 64 and 128.

Each engine answers everything twice: computed, which must be what a plain engine answers, and then from the store.
All of them share one store, in which each finds only what is its own. Also for machines with GPUs:

    KVTIER_TEST_GPUS=0,1 python -m pytest -m "slow or not slow" tests/engines/test_node_store_models.py

There windows and two ranks run in float32, on vLLM's Triton kernels, and the others in bfloat16 on FlashAttention's.
"""

import asyncio
from typing import NamedTuple

import model_shapes
import pytest
from engine_client import Reply, driving, off, random_tokens
from engine_fixtures import start_missing
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, NodeStore, runtime_dir, seeded, store_env, store_in
from tiny_models import CHUNK

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import ServiceFailed, free_port, kill_all


class Kind(NamedTuple):
    """``tolerance``: rounding, what is computed with what in a batch and the codec move a logprob by less than this."""

    model: str
    block: int
    flags: tuple[str, ...] = ("--dtype", "float32")
    ranks: int = 1
    tolerance: float = 2e-3
    codec: str | dict[str, str] = "raw"  # if not, one for each kind of attention there is

    @property
    def written(self) -> float:
        """The tolerance where decode steps wrote what a prefill writes in the truth: in 8 bits, slightly other KV."""
        return self.tolerance * (3 if GPUS and "bfloat16" in self.flags else 1)


FLOAT32, BF16 = ("--dtype", "float32"), ("--dtype", "bfloat16")
MIXED = {"full": "int8", "sliding": "rot4"}
if GPUS:
    KINDS = {
        "ranks": Kind("recall", 128, ranks=2, tolerance=1e-2),
        "hybrid": Kind("hybrid", 16, tolerance=1e-2),
        "mixed": Kind("hybrid", 64, BF16, tolerance=0.25, codec=MIXED),
        "mla": Kind("mla", 64, BF16, tolerance=0.3),  # most of its kernels know one block size
        "fp8": Kind("dense", 16, (*BF16, "--kv-cache-dtype", "fp8"), tolerance=0.3),
    }
else:
    KINDS = {
        "ranks": Kind("recall", 128, ranks=2),
        "hybrid": Kind("hybrid", 64),
        "chunked": Kind("chunked", 64),
        "mixed": Kind("hybrid", 64, BF16, tolerance=0.3, codec=MIXED),
        "fp8": Kind("dense", 32, (*FLOAT32, "--kv-cache-dtype", "fp8"), tolerance=2e-2),
    }
SLOW = ("fp8", "mixed", "mla")
SHAPES = {"hybrid": model_shapes.HYBRID, "mla": model_shapes.MLA, "dense": model_shapes.DENSE}
SHAPES["chunked"] = model_shapes.CHUNKED
PARAMS = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in KINDS]


class Pair(NamedTuple):
    kind: Kind
    engine: Engine
    plain: Engine


class Pairs(NamedTuple):
    store: NodeStore
    by_name: dict[str, Pair]
    failed: dict[Engine, str]  # engines that did not start, and their last output


@pytest.fixture(scope="module")
def pairs(request, plain, model_path, log_dir):
    """All of them, started together: of each kind one with the store and a plain one."""
    wanted = {item.callspec.params["pair"] for item in request.session.items if item.path == request.path}
    with runtime_dir() as folder:
        pairs = {}
        for number, name in enumerate(sorted(wanted)):
            kind = KINDS[name]
            shape = SHAPES.get(kind.model)
            model = model_shapes.write(shape, log_dir / "models" / shape.name, model_path) if shape else model_path
            gpus = [GPUS[(number + i) % len(GPUS)] for i in range(kind.ranks)] if GPUS else []
            if len(set(gpus)) < len(gpus):
                continue  # of such a pair its tests say that it needs more devices

            def engine(role: str, kv: dict | None, ranks: int, name=name, kind=kind, model=model, gpus=gpus) -> Engine:
                return Engine(
                    model,
                    name=f"{name}-{role}",
                    kv=kv,
                    block_size=kind.block,
                    args=(*kind.flags, *GPU_FLAGS),
                    log_dir=log_dir,
                    tensor_parallel=ranks,
                    gpus=gpus[:ranks],
                    env=store_env(folder),
                    ready_seconds=150 if GPUS else 240,
                )

            extra = {**OPTIONS, "store_size": "256MiB", "load_policy": "always", "codec": kind.codec}
            extra["pull_threshold"] = min(kind.block - 1, OPTIONS["pull_threshold"])
            extra["endpoint_port"] = free_port()
            if GPUS:
                alone = engine("plain", None, 1)
            else:
                # Two ranks answer as one does: no engine of its own for that.
                alone = plain if kind.ranks > 1 else engine("plain", None, 1)
            pairs[name] = Pair(kind, engine("store", kvtier(extra), kind.ranks), alone)
        engines = [e for pair in pairs.values() for e in pair[1:]]
        try:
            yield Pairs(store_in(folder), pairs, start(engines))
        finally:
            kill_all(e for e in engines if e is not plain)


def start(engines: list[Engine]) -> dict[Engine, str]:
    """On machines with GPUs some kernels may be missing: one kind of engine that does not start stops no other."""
    if not GPUS:
        start_missing(engines)
        return {}
    failed = {}
    for engine in engines:
        engine.start()
    for engine in engines:
        try:
            engine.wait_ready()
        except ServiceFailed as failure:
            failed[engine] = str(failure)[:3000]
    return failed


@pytest.fixture(params=PARAMS)
def pair(request, pairs: Pairs) -> Pair:
    pair = pairs.by_name.get(request.param)
    if pair is None:
        pytest.skip(f"{request.param}: too few devices")
    if pair.plain in pairs.failed:
        pytest.skip(f"vLLM starts no {request.param} here: {pairs.failed[pair.plain][:300]}")
    if pair.engine in pairs.failed:
        pytest.fail(pairs.failed[pair.engine], pytrace=False)
    return pair


@pytest.fixture
async def kinds(plain, pairs: Pairs):
    async with driving(plain, NodeDriver) as driver:
        driver.node = Node(plain, plain, plain, pairs.store, {})  # only the store matters here
        yield driver


async def answers(kinds: NodeDriver, pair: Pair, prompt: list[int], params=ASKED) -> Reply:
    return await kinds.ask(pair.engine, prompt, 6, params)


async def lost(kinds: NodeDriver, pair: Pair) -> float:
    """How often the engine gave the store up.

    Two ranks do on two cores: vLLM's workers spin while a request waits for an answer, and the store's process waits
    for a core. Then they compute, as they should, and what was meant to be seen is tried again.
    """
    await kinds.flushed(pair.engine)
    return await kinds.kvtier(pair.engine, "store_disconnects")


async def kept(kinds: NodeDriver, pair: Pair, prompt: list[int], tokens: int | None = None) -> None:
    """Its whole blocks, or so many tokens, are in the store; computed again if the store was lost meanwhile."""
    tokens = len(prompt) // pair.kind.block * pair.kind.block if tokens is None else tokens
    for last in (False, False, False, True):
        try:
            return await kinds.stored(pair.engine, prompt, tokens, seconds=6.0)
        except AssertionError:
            if last or not await lost(kinds, pair):
                raise
        await kinds.reset(pair.engine)
        await answers(kinds, pair, prompt)


async def warm_answer(kinds: NodeDriver, pair: Pair, prompt: list[int], params=ASKED) -> Reply:
    for _ in range(4):
        before = await lost(kinds, pair)
        reply = await answers(kinds, pair, prompt)
        if reply.pulled or await lost(kinds, pair) == before:
            break
        await kept(kinds, pair, prompt)
        await kinds.reset(pair.engine)
    return reply


def lengths_of(pair: Pair) -> list[int]:
    block, window = pair.kind.block, model_shapes.WINDOW
    lengths = [block - 1, block, block + 1, 5 * block, 7 * block + 7]
    if pair.kind.model == "chunked":  # around the end of a chunk; of a whole prompt, its last chunk is needed
        lengths += [CHUNK, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + block, 2 * CHUNK + 2 * block + 5]
    return lengths + ([5 * block + window - 1, 5 * block + window + 1] if pair.kind.model == "hybrid" else [])


async def test_stored_kv_answers_equal_computed(kinds, pair: Pair):
    rng = seeded(f"kinds {pair.engine.name}")
    prompts = [random_tokens(rng, length) for length in lengths_of(pair)]
    cold = [await answers(kinds, pair, prompt) for prompt in prompts]
    plain = await asyncio.gather(*(kinds.ask(pair.plain, prompt, 6) for prompt in prompts))
    worst = max(off(*both, pair.kind.tolerance) for both in zip(cold, plain, strict=True))
    assert worst < pair.kind.tolerance, "computed with the connector, and without"
    for prompt, reply in zip(prompts, cold, strict=True):
        assert reply.pulled == 0
        await kept(kinds, pair, prompt)
    await kinds.reset(pair.engine)
    moved = []
    for prompt, want in zip(prompts, cold, strict=True):
        reply = await warm_answer(kinds, pair, prompt)
        whole = len(prompt) // pair.kind.block * pair.kind.block
        assert reply.report["local_tokens"] == 0
        # With windows, the last token of a prompt that the store has whole is left out.
        said = f"{len(prompt)} tokens: {reply.report}, {await kinds.counters(pair.engine)}"
        assert reply.pulled in (whole, whole - (whole == len(prompt))), said
        moved.append(off(reply, want, pair.kind.tolerance))
        assert moved[-1] < pair.kind.tolerance, (len(prompt), reply.report)
    print(f"{pair.engine.name}: logprobs from the store differ by {max(moved):.5f} at most")
    await sound(kinds, pair)


async def test_different_kv_changes_the_answer(kinds, pair: Pair):
    """Or the rest proves nothing: a corrupt beginning that was not verified would be seen in the answer."""
    rng = seeded(f"otherwise {pair.engine.name}")
    tail = random_tokens(rng, 12)
    differ = []
    # In bfloat16 much passes for rounding; some other KV must not.
    while max(differ, default=0) <= 3 * pair.kind.tolerance and len(differ) < 24:
        one, other = [await answers(kinds, pair, random_tokens(rng, 148) + tail) for _ in range(2)]
        differ.append(off(one, other, pair.kind.tolerance))
    print(f"{pair.engine.name}: other KV moves logprobs by {differ}")
    assert max(differ) > 3 * pair.kind.tolerance


async def test_generated_tokens_of_concurrent_requests_load_from_store(kinds, pair: Pair):
    """Longer than a window, so that what generating left behind matters."""
    rng, block = seeded(f"turns {pair.engine.name}"), pair.kind.block
    prompts = [random_tokens(rng, rng.randrange(2 * block, 5 * block)) for _ in range(4)]
    count = max(block + 20, model_shapes.WINDOW + 4 if pair.kind.model == "hybrid" else 0)
    first = await asyncio.gather(*(kinds.ask(pair.engine, prompt, count, ASKED) for prompt in prompts))
    longer = [p + reply.tokens + random_tokens(rng, 9) for p, reply in zip(prompts, first, strict=True)]
    held = [(len(p) + count - 1) // block * block for p in prompts]
    for prompt, tokens in zip(longer, held, strict=True):
        await kept(kinds, pair, prompt, tokens)
    await kinds.reset(pair.engine)
    warm = await asyncio.gather(*(answers(kinds, pair, prompt) for prompt in longer))
    if not all(reply.pulled for reply in warm) and await lost(kinds, pair):
        await kinds.reset(pair.engine)
        warm = [await warm_answer(kinds, pair, prompt) for prompt in longer]
    moved = []
    for prompt, tokens, reply in zip(longer, held, warm, strict=True):
        assert (reply.pulled, reply.report["local_tokens"]) == (tokens, 0), reply.report
        want = await kinds.ask(pair.plain, prompt, 6)
        moved.append(off(reply, want, pair.kind.written))
        assert moved[-1] < pair.kind.written, reply.report
    print(f"{pair.engine.name}: logprobs on generated text differ by {max(moved):.5f} at most")
    await sound(kinds, pair)


async def test_flipped_bits_are_detected_and_recomputed(kinds, pair: Pair):
    """In any rank's part and any group's block: the request is computed, from where it is wrong on or whole."""
    rng = seeded(f"flips {pair.engine.name}")
    prompt = random_tokens(rng, 4 * pair.kind.block + 9)
    cold = await answers(kinds, pair, prompt)
    await kept(kinds, pair, prompt)
    await kinds.reset(pair.engine)
    await kinds.flushed(pair.engine)
    before = await kinds.kvtier(pair.engine, "integrity_failures")
    with kinds.node.store.memory() as memory:
        for page in memory.written():
            memory.flip(rng, page)
    reply = await answers(kinds, pair, prompt)
    assert reply.pulled == 0 and off(reply, cold, pair.kind.tolerance) < pair.kind.tolerance, reply.report
    if not await lost(kinds, pair):
        assert await kinds.kvtier(pair.engine, "integrity_failures") > before
        assert "blocks have a wrong checksum; the store discards them" in pair.engine.log_path.read_text()
    await asyncio.to_thread(kinds.node.store.clear)


async def sound(kinds: NodeDriver, pair: Pair) -> None:
    await kinds.flushed(pair.engine)
    assert await kinds.kvtier(pair.engine, "integrity_failures") == 0
    assert await kinds.kvtier(pair.engine, "loads", "failed") == 0
    assert await kinds.kvtier(pair.engine, "loads", "ok") > 0
    for codec in pair.kind.codec.values() if isinstance(pair.kind.codec, dict) else ():
        assert await kinds.kvtier(pair.engine, "stored_logical_bytes", codec) > 0
    await kinds.until_idle(pair.engine)
    counts = await asyncio.to_thread(kinds.node.store.counts)
    assert (counts.index.leases, counts.index.reservations) == (0, 0)
