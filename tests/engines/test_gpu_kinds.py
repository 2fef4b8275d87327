"""Each kind of KV cache group on a GPU, also those whose kernels need one: stored and loaded, and handed off.

    KVTIER_TEST_GPUS=0 python -m pytest tests/engines/test_gpu_kinds.py

The models are tiny and their answers depend on all of their history (``tiny_models``). Three engines a kind: one with a
node store, which is also the prefill engine, a decode engine, and a plain one, whose answers are right.
"""

import asyncio
import json
from typing import NamedTuple

import pytest
import tiny_models
from engine_client import Reply, driving, random_tokens
from model_shapes import GPUS
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, runtime_dir, seeded, store_env, store_in
from test_cache_kinds import off

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import ServiceFailed, free_port, kill_all

pytestmark = pytest.mark.skipif(not GPUS, reason="KVTIER_TEST_GPUS names no device")

ANSWER = 8  # tokens


class Kind(NamedTuple):
    """``block``: as the flag, tokens; vLLM makes it larger where states need that. ``tolerance``: of logprobs, which
    kernels and batches move."""

    block: int
    flags: tuple[str, ...]
    tolerance: float = 2e-2


FLOAT32, BF16 = ("--dtype", "float32"), ("--dtype", "bfloat16")
KINDS = {
    "chunked": Kind(64, FLOAT32),
    # Its other backends come in packages of their own.
    "gdn": Kind(16, (*BF16, "--gdn-prefill-backend", "triton"), 0.3),
    "mamba2": Kind(16, FLOAT32),
    "mamba2-only": Kind(16, (*FLOAT32, "--enable-prefix-caching")),
    "mamba1": Kind(16, (*BF16, "--enable-prefix-caching"), 0.3),
    "short-conv": Kind(16, BF16, 0.3),
    "kda": Kind(64, (*BF16, "--enable-prefix-caching"), 0.3),
    "swa-sink": Kind(16, BF16, 0.3),
    "mla": Kind(64, BF16, 0.3),
    "mla-sparse": Kind(64, BF16, 0.3),
    "swa-mla": Kind(256, BF16, 0.3),
}
MEMORY = ("--gpu-memory-utilization", "0.04")


class Trio(NamedTuple):
    kind: Kind
    engine: Engine
    decode: Engine
    plain: Engine


@pytest.fixture(scope="module")
def trios(request, model_path, log_dir):
    """All wanted kinds, started together; of those that this vLLM cannot start on this device, the reason."""
    wanted = sorted({item.callspec.params["kind"] for item in request.session.items if item.path == request.path})
    with runtime_dir() as folder:
        made: dict[str, Trio] = {}
        failed: dict[str, str] = {}
        for name in wanted:
            kind = KINDS[name]
            try:
                model = tiny_models.build(name, log_dir / "models" / name, model_path)
            except AttributeError as error:  # of an older transformers
                failed[name] = str(error)
                continue

            def engine(role: str, kv: dict | None, name=name, kind=kind, model=model) -> Engine:
                return Engine(
                    model, name=f"{name}-{role}", kv=kv, block_size=kind.block, args=(*kind.flags, *MEMORY),
                    log_dir=log_dir, gpus=GPUS[:1], env=store_env(folder), kv_cache_bytes=512 << 20, ready_seconds=240,
                )  # fmt: skip

            extra = {**OPTIONS, "store_size": "1GiB", "load_policy": "always", "bidirectional": True}
            prefill = kvtier({**extra, "endpoint_port": free_port()})
            decode = kvtier({**extra, "endpoint_port": free_port(), "store": "off"})
            made[name] = Trio(kind, engine("store", prefill), engine("decode", decode), engine("plain", None))
        engines = [each for trio in made.values() for each in trio[1:]]
        try:
            for each in engines:
                each.start()
            for name, trio in made.items():
                try:
                    for each in (trio.plain, trio.engine, trio.decode):
                        each.wait_ready()
                except ServiceFailed as error:
                    failed[name] = f"{each.name}: {error}"
            yield made, failed, store_in(folder)
        finally:
            kill_all(engines)


def of(trios, kind: str) -> Trio:
    made, failed, _ = trios
    if kind in failed and f"{kind}-plain" not in failed[kind]:
        pytest.fail(failed[kind][-3000:])
    if kind in failed:
        pytest.skip(f"vLLM itself does not serve it here: {failed[kind]}")
    return made[kind]


@pytest.fixture
async def driver(trios, kind):
    trio = of(trios, kind)
    async with driving(trio.plain, NodeDriver) as driver:
        driver.node = Node(trio.engine, trio.engine, trio.plain, trios[2], {})
        yield driver


def right(got: Reply, want: Reply, kind: Kind, what: object) -> None:
    assert off(got, want, kind.tolerance) < kind.tolerance, (what, got.report)


@pytest.mark.parametrize("kind", KINDS)
async def test_gpu_kind_is_loaded_from_the_store(trios, kind, driver):
    """Conversations that grow, several at once, with the GPU's prefix cache emptied between their turns."""
    trio = of(trios, kind)
    rng = seeded(f"conversations {kind}")
    stem, loaded = random_tokens(rng, 1400), 0
    conversations = [stem + random_tokens(rng, rng.randrange(1, 500)) for _ in range(3)]
    for turn in range(3):
        replies = await asyncio.gather(*(driver.ask(trio.engine, each, ANSWER, ASKED) for each in conversations))
        for i, reply in enumerate(replies):
            want = await driver.ask(trio.plain, conversations[i], ANSWER)
            right(reply, want, trio.kind, (turn, len(conversations[i])))
            loaded += reply.pulled
            conversations[i] += reply.tokens + random_tokens(rng, rng.randrange(1, 300))
        await driver.until_idle(trio.engine)
        await driver.reset(trio.engine)
    print(json.dumps({"kind": kind, "loaded": loaded, "counters": await driver.counters(trio.engine)}))
    assert loaded > 1400
    assert await driver.kvtier(trio.engine, "integrity_failures") == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_gpu_kind_is_handed_off(trios, kind, driver):
    """From the prefill to the decode engine, and on the next turn back."""
    trio = of(trios, kind)
    rng = seeded(f"hand-offs {kind}")
    pulled = []
    for length in (700, 1501):
        prompt = random_tokens(rng, length)
        own = await driver.ask(trio.plain, prompt, 1 + ANSWER)
        _, reply = await driver.hand_off(trio.engine, trio.decode, prompt + own.tokens[:1], ANSWER)
        want = await driver.ask(trio.plain, prompt + own.tokens[:1], ANSWER)
        right(reply, want, trio.kind, length)
        pulled.append(reply.pulled)
    print(json.dumps({"kind": kind, "handed_off": pulled}))
    assert await driver.kvtier(trio.decode, "integrity_failures") == 0
    assert min(pulled) > 0, pulled
