"""The proxy with policy ``kv_events`` before two real engines of one node, which share its store."""

import asyncio
import re

import httpx
import pytest
from engine_client import random_tokens
from node_fixtures import Node, events_of, seeded

from vllm_kvtier.devtools.clients import prompt_tokens

BLOCK = 32
LENGTH = 16 * BLOCK + 5


@pytest.fixture
def start_proxy(node: Node, make_proxy, tmp_path):
    """Starts proxies that share a salt, and know nothing but events."""
    secret = tmp_path / "salt"
    secret.write_text("0123456789abcdef")

    def start(name: str):
        args = ["--routing-policy", "kv_events", "--salt-secret-file", str(secret)]
        for engine, letter in zip(node.engines, "AB", strict=True):
            events, replay = events_of(node.store, letter), events_of(node.store, f"{letter}-replay")
            args += ["--decode", f"{engine.base_url},events={events},replay={replay}"]
        return make_proxy([], [], name=name, args=args)

    return start


async def blocks(http: httpx.AsyncClient, node: Node, tier: str) -> list[int]:
    """Blocks of each engine in a tier, as the proxy knows them."""
    page = (await http.get("/metrics")).text
    found = []
    for letter in "AB":
        where = re.escape(events_of(node.store, letter))
        sample = re.search(rf'kv_blocks{{events="{where}",tier="{tier}"}} ([\d.]+)', page)
        found.append(int(float(sample[1])) if sample else 0)
    return found


async def test_request_follows_its_kv_from_tier_to_tier(node: Node, nodes, start_proxy):
    await asyncio.to_thread(node.store.until_up)
    await asyncio.to_thread(node.store.clear)
    for engine in node.engines:
        await nodes.uses_store(engine)
        await nodes.reset(engine)
    prompt = random_tokens(seeded("routing"), LENGTH)

    def served() -> list[int]:
        return [prompt_tokens(engine.base_url).total for engine in node.engines]

    async def send(http: httpx.AsyncClient, text: list[str]) -> int:
        """The engine that served the prompt, by its number."""
        before = served()
        body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        reply = await http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        text.append(reply.json()["choices"][0]["text"])
        (number,) = [i for i, (now, was) in enumerate(zip(served(), before, strict=True)) if now != was]
        return number

    async def until(http: httpx.AsyncClient, tier: str, least: list[int]) -> None:
        async def there() -> bool:
            return all(a >= b for a, b in zip(await blocks(http, node, tier), least, strict=True))

        await nodes.until(there, 20, f"{tier} of the engines: {least}")

    texts: list[str] = []
    count = LENGTH // BLOCK
    with start_proxy("one") as one:
        async with httpx.AsyncClient(base_url=one.base_url, timeout=60) as http:
            # The first one is to be the engine that measures: later the other one has to load.
            drained = {"engine": node.first.base_url}
            assert (await http.post("/kvtier/drain", json=drained)).status_code == 200
            first = await send(http, texts)
            assert (await http.post("/kvtier/resume", json=drained)).status_code == 200
            await until(http, "gpu", [count * (i == first) for i in range(2)])
            await until(http, "host", [count, count])  # the store is shared
            for _ in range(3):
                assert await send(http, texts) == first
            # A proxy that starts now has the same from the replay.
            with start_proxy("two") as two:
                async with httpx.AsyncClient(base_url=two.base_url, timeout=60) as other:
                    await until(other, "gpu", [count * (i == first) for i in range(2)])
                    await until(other, "host", [count, count])
                    for _ in range(2):
                        assert await send(other, texts) == first
                    page = (await other.get("/metrics")).text
                    known = float(re.search(r"prompt_tokens_known_total ([\d.]+)", page)[1])
                    assert known == 2 * count * BLOCK, "every request's blocks were known"
                    # That engine gets no requests: the other one loads, and computes a block at most.
                    drained = {"engine": node.engines[first].base_url}
                    assert (await other.post("/kvtier/drain", json=drained)).status_code == 200
                    before = prompt_tokens(node.engines[1 - first].base_url)
                    assert await send(other, texts) == 1 - first
                    computed = prompt_tokens(node.engines[1 - first].base_url) - before
                    assert computed.computed <= BLOCK, computed
    assert len(set(texts)) == 1
