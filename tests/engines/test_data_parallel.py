"""Engines that are not one rank each: vLLM's own data parallelism, and tensor parallel sizes that differ.

As in ``test_peer_fetch``, the node store keeps nothing: what a rank did not compute, it copied from another one.
"""

import random
from collections.abc import Iterator

import pytest
from engine_client import driving, random_tokens
from engine_fixtures import start_missing
from model_shapes import GPUS
from node_fixtures import Node, runtime_dir, store_env, store_in, wrong_checksums
from test_peer_fetch import NEAR, Ranks, flags, right  # noqa: F401

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

BLOCK = 32


def devices(first: int, count: int) -> tuple[int, ...]:
    return tuple(GPUS[(first + n) % len(GPUS)] for n in range(count)) if GPUS else ()


def engine(model_path, log_dir, folder, name: str, gpus=(), tensor_parallel: int | None = None, args=()) -> Engine:
    common = flags()
    common["args"] = (*common["args"], *args)
    kv = kvtier({**NEAR, "endpoint_port": free_port()})  # to which data-parallel ranks add their number
    return Engine(
        model_path, name=name, kv=kv, gpus=gpus, tensor_parallel=tensor_parallel, log_dir=log_dir,
        env=store_env(folder), worker_process=True, **common,
    )  # fmt: skip


@pytest.fixture
def folder() -> Iterator:
    with runtime_dir() as made:
        yield made


async def test_data_parallel_ranks_fetch_from_each_other(model_path, log_dir, folder, right):  # noqa: F811
    """Behind one server, which spreads requests over them; here each request names its rank."""
    one = engine(
        model_path, log_dir, folder, "data-parallel", devices(0, 2), 1, ("--data-parallel-size", "2")
    )  # fmt: skip
    try:
        start_missing([one, right])
        async with driving(right, Ranks) as driver:
            driver.node = Node(one, one, right, store_in(folder), {})
            rng = random.Random("data parallel")

            async def acquainted() -> bool:
                prompt = random_tokens(rng, 300)
                await driver.asked(one, prompt, 1, headers={"X-data-parallel-rank": "0"})
                reply = await driver.asked(one, prompt, 1, headers={"X-data-parallel-rank": "1"})
                return (reply.report["pulled_from"] or "").startswith("gpu ")

            await driver.until(acquainted, 30, "one rank fetches from the other")
            for first in (0, 1, 0, 1):
                prompt = random_tokens(rng, rng.randrange(300, 1500))
                await driver.asked(one, prompt, 4, headers={"X-data-parallel-rank": str(first)})
                await driver.published(one, prompt, 1 - first)
                reply = await driver.asked(one, prompt, 4, headers={"X-data-parallel-rank": str(1 - first)})
                assert reply.pulled == len(prompt) // BLOCK * BLOCK, reply.report
                assert reply.report["pulled_from"].startswith("gpu ")
            counters = await driver.counters(one)
            assert not wrong_checksums(counters) and not counters.get("fetches failed"), counters
    finally:
        kill_all([one])


@pytest.mark.slow
async def test_peer_fetch_between_different_tensor_parallel_sizes(model_path, log_dir, folder, right):  # noqa: F811
    """Heads of one cache are spread over two in the other: both ways, and every token right."""
    engines = [
        engine(model_path, log_dir, folder, "one-rank", devices(0, 1), 1),
        engine(model_path, log_dir, folder, "two-ranks", devices(0, 2), 2),
    ]
    try:
        start_missing([*engines, right])
        async with driving(right, Ranks) as driver:
            driver.engines = engines
            driver.node = Node(*engines, right, store_in(folder), {})
            await driver.acquainted()
            rng = random.Random("tensor parallel")
            for n in range(6):
                prompt = random_tokens(rng, rng.randrange(100, 1500))
                await driver.asked(engines[n % 2], prompt, 4)
                reply = await driver.from_gpu(engines[1 - n % 2], prompt, 4)
                assert reply.pulled == len(prompt) // BLOCK * BLOCK, reply.report
            await driver.nothing_is_lent()
            for each in engines:
                counters = await driver.counters(each)
                assert not wrong_checksums(counters) and not counters.get("fetches failed"), counters
    finally:
        kill_all(engines)
