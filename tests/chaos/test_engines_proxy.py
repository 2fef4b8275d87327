"""Real engines killed one after the other behind the proxy, under load: no answer is wrong, none has anything twice."""

import asyncio
import json
import random
import time
from collections import Counter

import httpx
import pytest
from engine_fixtures import ENGINE_FLAGS, SHORT, start_missing

CLIENTS, ANSWER = 6, 24


def body_of(prompt: tuple[int, ...], **fields) -> dict:
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": ANSWER}
    return {"model": "model", "prompt": list(prompt), **greedy, **fields}


class Load:
    """Clients that stream greedy completions through the proxy and compare each with what it must be."""

    def __init__(self, base_url: str, truths: dict[tuple[int, ...], str]):
        self.base_url, self.truths = base_url, truths
        self.outcomes: Counter[str] = Counter()
        self.since: Counter[str] = Counter()  # a moment's, see ``whole_ones``
        self.ends = False

    async def client(self, http: httpx.AsyncClient, seed: int) -> None:
        rng = random.Random(seed)
        while not self.ends:
            prompt = rng.choice(list(self.truths))
            outcome = await self.one(http, prompt)
            self.outcomes[outcome] += 1
            self.since[outcome] += 1
            if outcome == "refused":
                await asyncio.sleep(0.1)  # as Retry-After asks of clients

    async def one(self, http: httpx.AsyncClient, prompt: tuple[int, ...]) -> str:
        want, text, finished = self.truths[prompt], "", False
        try:
            body = body_of(prompt, stream=True)
            async with http.stream("POST", f"{self.base_url}/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    assert reply.status_code in (429, 502, 503, 504), reply.text
                    return "refused"
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        for choice in event.get("choices", ()):
                            text += choice["text"]
                            finished |= choice["finish_reason"] is not None
        except httpx.TransportError:
            finished = False
        assert want.startswith(text), f"not a beginning of the right answer: {text!r} instead of {want!r}"
        assert not finished or text == want, f"an answer that ended early: {text!r} instead of {want!r}"
        return "whole" if finished else "cut" if text else "nothing"

    async def whole_ones(self, count: int) -> None:
        self.since.clear()
        begin = time.monotonic()
        while self.since["whole"] < count:
            assert time.monotonic() < begin + 60, f"too few answers: {self.since}"
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_proxy_engines_killed_in_turn_under_load_bounds_lost_requests(make_engine, make_proxy):
    engines = [make_engine(name, SHORT, **ENGINE_FLAGS) for name in ("P", "D1", "D2")]
    start_missing(engines)
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(100, 900) for _ in range(rng.randint(150, 600))) for _ in range(16)]
    async with httpx.AsyncClient(timeout=60) as http:
        truths = {}
        for prompt in prompts:
            body = {
                "model": "model",
                "prompt": list(prompt),
                "max_tokens": ANSWER,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = await http.post(f"{engines[1].base_url}/v1/completions", json=body)
            truths[prompt] = answer.raise_for_status().json()["choices"][0]["text"]
        with make_proxy(engines[:1], engines[1:]) as proxy:
            load = Load(proxy.base_url, truths)
            clients = [asyncio.create_task(load.client(http, seed)) for seed in range(CLIENTS)]
            try:
                await load.whole_ones(20)
                for engine in (engines[1], engines[0], engines[2]):
                    await asyncio.to_thread(engine.kill)
                    await load.whole_ones(20)  # the others go on
                    await asyncio.to_thread(start_missing, [engine])
                    await load.whole_ones(20)
            finally:
                load.ends = True
                results = await asyncio.gather(*clients, return_exceptions=True)
    assert not [result for result in results if result is not None], results
    print(dict(load.outcomes))
    assert load.outcomes["whole"] >= 140
    # Only what was under way on a decode engine that died: a client's one request a kill, and what was sent before it
    # was noticed.
    assert load.outcomes["cut"] + load.outcomes["nothing"] <= 3 * CLIENTS, load.outcomes
