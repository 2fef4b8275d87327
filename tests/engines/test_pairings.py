"""Prefill and decode engines that are not set up alike: what works together does, what does not is refused with a
reason and computed.

Not part of a normal run (``-m slow``): nine engines, the most that start in a few minutes on two cores.
"""

import itertools
import random

import pytest
from engine_client import Driver, Reply, assert_same, driving, random_tokens, with_sources
from test_following import both

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all, start_all

pytestmark = pytest.mark.slow
RETAIN_SECONDS = 8.0


@pytest.fixture(scope="module")
def make_engines(demo_model, log_dir):
    """Engines of the demo model in float32, by name; options as Engine's, and ``extra`` for the connector."""
    made: list[Engine] = []

    def make(**engines: dict) -> dict[str, Engine]:
        kill_all(made)  # the two cores are needed
        made.clear()
        for name, options in engines.items():
            extra = {"bidirectional": True, "pull_threshold": 16, "retain_seconds": RETAIN_SECONDS, "store": "off"}
            extra |= {"endpoint_port": free_port(), **options.pop("extra", {})}
            flags = ("--dtype", "float32")
            made.append(Engine(demo_model, name=name, kv=kvtier(extra), args=flags, log_dir=log_dir, **options))
        start_all(made)
        return dict(zip(engines, made, strict=True))

    yield make
    kill_all(made)


@pytest.fixture(scope="module")
def ranks(make_engines):
    """Prefill and decode engines of two ranks each, and a prefill engine of one."""
    two = {"tensor_parallel": 2}
    return make_engines(P2=dict(two), D2=dict(two), P1={})


@pytest.fixture(scope="module")
def buffers(make_engines):
    """Prefill and decode engines with host buffers, the decode engine without."""
    always = {"extra": {"host_buffer": "always"}}
    return make_engines(PH=dict(always), DH=dict(always), D={})


@pytest.fixture(scope="module", params=["auto", "nixl"])
def sizes(make_engines, request):
    """Blocks of 32, 64 and 128 tokens, read from mapped memory or through the ring."""
    extra = {"same_node_pulls": request.param}
    return make_engines(**{f"B{n}": {"block_size": n, "extra": dict(extra)} for n in (32, 64, 128)})


async def _pulled(driver: Driver, p: Engine, d: Engine, length: int, seed: int) -> tuple[list[int], Reply]:
    """A hand-off that is pulled whole and answered as the prefill engine itself answers."""
    prompt = random_tokens(random.Random(seed), length)
    _, reply = await driver.hand_off(p, d, prompt, 40)
    assert (reply.pulled, reply.report["pulled_from"]) == (length, p.kv_address), reply.report
    assert_same(reply, await driver.ask(p, prompt, 40, cache_salt="fresh"), (p.name, d.name))
    return prompt, reply


async def _pulled_back(
    driver: Driver, p: Engine, d: Engine, prompt: list[int], answer: list[int], block: int = 32
) -> None:
    """In the next turn the prefill engine pulls what the decode engine generated: whole blocks of it."""
    longer = prompt + answer + random_tokens(random.Random(len(prompt)), 30)
    reply = await driver.prefill(p, longer, with_sources(d))
    held = (len(prompt) + len(answer) - 1) // block * block
    assert reply.report["local_tokens"] + reply.pulled == held and reply.pulled >= 32, reply.report
    assert reply.report["pulled_from"] == d.kv_address
    assert_same(reply, await driver.ask(p, longer, 1, cache_salt="fresh"), (p.name, d.name))


async def _refused(driver: Driver, p: Engine, d: Engine, words: str, seed: int) -> None:
    prompt = random_tokens(random.Random(seed), 200)
    _, reply = await driver.hand_off(p, d, prompt, 8)
    assert (reply.pulled, reply.report["computed_tokens"]) == (0, 200)
    assert_same(reply, await driver.ask(p, prompt, 8), (p.name, d.name))
    log = d.log_path.read_text("utf-8", "replace")
    assert words in log, "the reason is in D's log"


async def _assert_sound(driver: Driver, *engines: Engine) -> None:
    for engine in engines:
        assert await driver.metric(engine, "vllm:kvtier_integrity_failures_total") == 0
        assert await driver.metric(engine, "vllm:kvtier_pulls_total", 'kind="failed"') == 0
    await driver.until_idle(*engines, seconds=40)  # refused hand-offs end with their time


async def test_two_rank_engines_pull_rank_by_rank_and_from_other_sizes(ranks):
    async with driving(ranks["P2"]) as driver:
        for seed, length in enumerate((33, 161, 200)):
            prompt, reply = await _pulled(driver, ranks["P2"], ranks["D2"], length, seed)
        await _pulled_back(driver, ranks["P2"], ranks["D2"], prompt, reply.tokens)
        assert await driver.metric(ranks["D2"], "vllm:kvtier_fetches_total") == 0, "equal ranks: by NIXL"
        for p, d in (("P1", "D2"), ("P2", "P1")):
            prompt, reply = await _pulled(driver, ranks[p], ranks[d], 200, 9 + ord(d[0]))
            await _pulled_back(driver, ranks[p], ranks[d], prompt, reply.tokens)
        await _assert_sound(driver, *ranks.values())


async def test_host_buffers_on_one_or_both_sides_pull(buffers):
    async with driving(buffers["PH"]) as driver:
        for seed, length in enumerate((33, 161, 200)):
            for d in ("DH", "D"):
                prompt, reply = await _pulled(driver, buffers["PH"], buffers[d], length, 20 + seed + 10 * len(d))
                await _pulled_back(driver, buffers["PH"], buffers[d], prompt, reply.tokens)
            await _pulled(driver, buffers["D"], buffers["DH"], length, 60 + seed)
        await _assert_sound(driver, *buffers.values())


async def test_engines_of_other_block_sizes_pull_both_ways(sizes):
    """With partial blocks of either size. Shared beginnings: then a pull begins within a block of the source."""
    async with driving(sizes["B32"]) as driver:
        for seed, (p, d) in enumerate(itertools.permutations(sizes, 2)):
            for length in (33, 200, 389):
                prompt, reply = await _pulled(driver, sizes[p], sizes[d], length, 100 + 10 * seed + length)
                block = int(d[1:])
                if (length + 39) // block * block - length // int(p[1:]) * int(p[1:]) >= 32:
                    await _pulled_back(driver, sizes[p], sizes[d], prompt, reply.tokens, block)
            longer = prompt + random_tokens(random.Random(seed), 150)
            _, reply = await driver.hand_off(sizes[p], sizes[d], longer, 8)
            local = reply.report["local_tokens"]
            assert local and reply.pulled + local == len(longer), reply.report
            assert_same(reply, await driver.ask(sizes[p], longer, 8, cache_salt="fresh"), (p, d))
            prompt = random_tokens(random.Random(f"both {seed}"), 389)
            _, reply = await both(driver, sizes[p], sizes[d], prompt)
            assert reply.pulled == 389, "a decode engine that is asked ahead waits for the prefill's end"
            assert_same(reply, await driver.ask(sizes[p], prompt, 8, cache_salt="fresh"), (p, d))
        await _assert_sound(driver, *sizes.values())
