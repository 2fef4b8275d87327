"""Conversations on tiny models of each kind of KV cache group: what is loaded answers as what is computed.

The models' answers depend on all of their history (``tiny_models``). Each kind has a negative control: zeroed or
exchanged blocks of one group, changed after their checksums were found right, change the answers.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
from altering_connector import VARIABLE
from engine_client import Reply, driving, random_tokens
from engine_fixtures import TESTS_ON_PATH, start_missing
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, NodeStore, runtime_dir, seeded, store_env, store_in

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

ANSWER = 8  # tokens


class Kind(NamedTuple):
    """``block``: tokens. ``groups``: that vLLM makes of the layers; so many of these have recurrent ``states``.
    ``tolerance``: rounding moves a logprob by less."""

    block: int
    groups: int
    flags: tuple[str, ...]
    states: int = 0
    tolerance: float = 2e-3


FLOAT32 = ("--dtype", "float32")
KINDS = {
    "chunked": Kind(64, 4, FLOAT32),
    "gdn": Kind(640, 3, ("--dtype", "bfloat16"), 2, tolerance=0.1),
    "mamba2": Kind(384, 3, (*FLOAT32, "--max-num-batched-tokens", "384"), 2),
    "mamba2-only": Kind(512, 1, (*FLOAT32, "--max-num-batched-tokens", "512", "--enable-prefix-caching"), 1),
    "short-conv": Kind(128, 2, FLOAT32, 1),
}


class Pair(NamedTuple):
    kind: Kind
    engine: Engine
    plain: Engine
    store: NodeStore
    plan: Path  # of ``altering_connector``


@pytest.fixture(scope="module", params=KINDS)
def pair(request, model_path, log_dir):
    kind = KINDS[request.param]
    model = tiny_models.build(request.param, log_dir / "models" / request.param, model_path)
    plan = log_dir / f"{request.param}.alter"
    plan.write_text("")
    with runtime_dir() as folder:

        def engine(role: str, kv: dict | None) -> Engine:
            env = {**store_env(folder), **TESTS_ON_PATH, VARIABLE: str(plan)}
            return Engine(
                model, name=f"{request.param}-{role}", kv=kv, block_size=kind.block, args=kind.flags, log_dir=log_dir,
                env=env, ready_seconds=240,
            )  # fmt: skip

        extra = {**OPTIONS, "store_size": "512MiB", "load_policy": "always", "endpoint_port": free_port()}
        altering = {"kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"}
        pair = Pair(kind, engine("store", {**kvtier(extra), **altering}), engine("plain", None), store_in(folder), plan)
        try:
            start_missing(pair[1:3])
            yield pair
        finally:
            kill_all(pair[1:3])


@pytest.fixture
async def kinds(pair: Pair):
    async with driving(pair.plain, NodeDriver) as driver:
        driver.node = Node(pair.engine, pair.engine, pair.plain, pair.store, {})
        yield driver


def off(got: Reply, want: Reply, tolerance: float) -> float:
    """Largest difference of logprobs, as far as the tokens are the same; they part only where two are as good."""
    worst = 0.0
    for a, b, x, y, best in zip(got.tokens, want.tokens, got.logprobs, want.logprobs, want.top, strict=True):
        if a != b:
            return worst if best[0] - best[1] < 2 * tolerance else float("inf")
        worst = max(worst, abs(x - y))
    return worst


async def test_cache_kind_conversations_answer_as_a_plain_engine(kinds, pair: Pair):
    """Several at once, that grow, are edited and begin alike; its prefix cache is reset between their turns."""
    rng = seeded(f"conversations {pair.engine.name}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    more = min(2 * block, 300)  # tokens of a turn at most
    stem, loaded = random_tokens(rng, 3 * block + 7), 0
    conversations = [stem + random_tokens(rng, rng.randrange(1, more)) for _ in range(3)]
    for turn in range(4):
        replies = await asyncio.gather(*(kinds.ask(pair.engine, each, ANSWER, ASKED) for each in conversations))
        for prompt, reply in zip(conversations, replies, strict=True):
            want = await kinds.ask(pair.plain, prompt, ANSWER)
            assert off(reply, want, tolerance) < tolerance, (turn, len(prompt), reply.report)
            loaded += reply.pulled
        for prompt in conversations:
            await kinds.stored(pair.engine, prompt, (len(prompt) - 1) // block * block)
        for i, reply in enumerate(replies):
            conversations[i] += reply.tokens + random_tokens(rng, rng.randrange(1, more))
        edited = rng.randrange(3)
        at = rng.randrange(len(conversations[edited]) // 2, len(conversations[edited]))
        conversations[edited][at:] = random_tokens(rng, rng.randrange(1, more))
        await kinds.reset(pair.engine)
    assert loaded > 6 * block, "most of what was known was loaded"
    assert await kinds.kvtier(pair.engine, "integrity_failures") == 0
    await kinds.until_idle(pair.engine)
    counts = await asyncio.to_thread(pair.store.counts)
    assert (counts.index.leases, counts.index.reservations) == (0, 0)


@pytest.mark.parametrize("how", ["zero", "exchange"])
async def test_cache_kind_altered_blocks_of_any_group_change_the_answer(kinds, pair: Pair, how):
    """Or the conversations prove nothing."""
    rng = seeded(f"altered {pair.engine.name} {how}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    prompt, other = (random_tokens(rng, 5 * block + 9) for _ in range(2))  # two blocks into the second chunk
    cold = await kinds.ask(pair.engine, prompt, ANSWER)
    await kinds.ask(pair.engine, other, 1)
    for each in (prompt, other):
        await kinds.stored(pair.engine, each, 5 * block)
    for plan in ("", *(f"{how} {group}" for group in range(pair.kind.groups)), ""):
        await kinds.reset(pair.engine)
        assert (await kinds.ask(pair.engine, other, 1, ASKED)).pulled == 5 * block
        pair.plan.write_text(plan)
        try:
            reply = await kinds.ask(pair.engine, prompt, ANSWER, ASKED)
        finally:
            pair.plan.write_text("")
        assert reply.pulled == 5 * block, reply.report
        moved = off(reply, cold, tolerance)
        assert moved > 3 * tolerance if plan else moved < tolerance, (plan, moved)


async def test_cache_kind_stale_states_change_the_answer(kinds, pair: Pair):
    """The right request's state, of a block before."""
    if not pair.kind.states:
        pytest.skip("attention only")
    rng = seeded(f"stale {pair.engine.name}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    prompt = random_tokens(rng, 3 * block + 9)
    earlier = prompt[: 2 * block + 9]
    cold = await kinds.ask(pair.engine, prompt, ANSWER)
    await kinds.stored(pair.engine, prompt, 3 * block)
    await kinds.reset(pair.engine)
    await kinds.ask(pair.engine, earlier, 1)
    await kinds.stored(pair.engine, earlier, 2 * block)
    moved = []
    for group in range(pair.kind.groups):
        await kinds.reset(pair.engine)
        assert (await kinds.ask(pair.engine, earlier, 1, ASKED)).pulled == 2 * block
        pair.plan.write_text(f"exchange {group}")
        try:
            reply = await kinds.ask(pair.engine, prompt, ANSWER, ASKED)
        finally:
            pair.plan.write_text("")
        assert reply.pulled == block, reply.report
        moved.append(off(reply, cold, tolerance))
    assert sum(each > 3 * tolerance for each in moved) == pair.kind.states, moved
    assert sum(each < tolerance for each in moved) == pair.kind.groups - pair.kind.states, moved
