"""Servers in OpenAI's format for the load generator's tests: known delays, known tokens, caches that are sets.

They run in the test's event loop, on real sockets.
"""

import asyncio
import itertools
import json
from collections import Counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from proxy_fakes import QuietServer

BLOCK = 16


class Node:
    """What the engines of a node share: which block prefixes are in host memory, and on whose GPU."""

    def __init__(self) -> None:
        self.host: set[tuple[int, ...]] = set()
        self.engines: list[FakeServer] = []


class FakeServer:
    """Streams ``max_tokens`` tokens: the first ``delays[source]`` seconds after the request, then one every ``itl``.

    ``source`` is where most of the prompt is: computed, local, peer or host, by prefixes of whole blocks; without a
    ``node`` there are neither peers nor host memory. Answers differ from request to request. ``faults``: by number of
    the request, from 0 on: a status, or "break" (after two tokens), "error" (an event says so), "hang".
    """

    def __init__(self, node: Node | None = None, itl: float = 0.0, says_tokens: bool = True, **delays: float):
        self.node, self.itl, self.says_tokens = node, itl, says_tokens
        self.delays = {"computed": 0.0, "local": 0.0, "peer": 0.0, "host": 0.0, **delays}
        self.faults: dict[int, int | str] = {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self.cache: set[tuple[int, ...]] = set()
        self.counts: Counter[str] = Counter()
        self.resets = True
        self.said = itertools.count(5000)
        self.release = asyncio.Event()
        if node:
            node.engines.append(self)

    async def __aenter__(self) -> "FakeServer":
        self._server = QuietServer(self._app())
        self.port, self.url = self._server.port, f"http://127.0.0.1:{self._server.port}"
        await self._server.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release.set()
        await self._server.end()

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models():
            return {"data": [{"id": "fake"}]}

        @app.get("/version")
        async def version():
            return {"version": "0.0.fake"}

        @app.get("/metrics")
        async def metrics():
            return PlainTextResponse(
                "# HELP x y\n" + "".join(f"{name} {value}\n" for name, value in self.counts.items())
            )

        @app.post("/reset_prefix_cache")
        async def reset():
            if not self.resets:
                return Response(status_code=404)
            self.cache.clear()
            return {"success": True}

        @app.post("/v1/completions")
        @app.post("/v1/chat/completions")
        async def generate(request: Request):
            body, number = await request.json(), len(self.bodies)
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            fault = self.faults.get(number)
            if isinstance(fault, int):
                return JSONResponse({"error": {"message": "out of order"}}, fault)
            return StreamingResponse(self._stream(body, fault), media_type="text/event-stream")

        return app

    async def _stream(self, body: dict[str, Any], fault: str | None):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            chat = "messages" in body
            await asyncio.sleep(0.0 if chat else self.delays[self._find(body["prompt"])])
            for number in range(body["max_tokens"]):
                if number:
                    await asyncio.sleep(self.itl)
                if number == 2 and fault == "hang":
                    await self.release.wait()
                if number == 2 and fault in ("break", "error", "hang"):
                    if fault == "error":
                        yield self._event({"error": {"message": "the engine died", "code": 500}})
                    return
                token = next(self.said)
                choice: dict[str, Any] = {"text": f"<{token}>", "finish_reason": None}
                if chat:
                    choice = {"delta": {"content": f"<{token}>"}}
                elif self.says_tokens and body.get("return_token_ids"):
                    choice["token_ids"] = [token]
                    if not number:
                        choice["prompt_token_ids"] = body["prompt"]  # as vLLM does
                yield self._event({"id": "x", "choices": [choice]})
            usage = {"prompt_tokens": len(body.get("prompt", "")) or 7, "completion_tokens": body["max_tokens"]}
            yield self._event({"id": "x", "choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.in_flight -= 1

    @staticmethod
    def _event(event: dict[str, Any]) -> str:
        return f"data: {json.dumps(event)}\n\n"

    def _find(self, prompt: list[int]) -> str:
        """Where most of the prompt is; counted as an engine does, and kept."""
        prefixes = [tuple(prompt[: i + BLOCK]) for i in range(0, len(prompt) - BLOCK, BLOCK)]
        peers = set().union(*(e.cache for e in self.node.engines if e is not self)) if self.node else set()
        host = self.node.host if self.node else set()
        found: Counter[str] = Counter()
        for name, held in (("local", self.cache), ("peer", peers), ("host", host)):
            rest = prefixes[sum(found.values()) :]
            found[name] = len(list(itertools.takewhile(held.__contains__, rest)))
        blocks = sum(found.values())
        for source, tokens in (
            ("local_cache_hit", found["local"] * BLOCK),
            ("external_kv_transfer", (found["peer"] + found["host"]) * BLOCK),
            ("local_compute", len(prompt) - blocks * BLOCK),
        ):
            name = f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="fake",source="{source}"}}'
            self.counts[name] += tokens
        self.counts['vllm:kvtier_loaded_tokens_total{engine="0",model_name="fake",kind=""}'] += found["host"] * BLOCK
        self.counts['vllm:kvtier_fetched_tokens_total{engine="0",model_name="fake",kind=""}'] += found["peer"] * BLOCK
        self.cache.update(prefixes)
        host.update(prefixes)
        source, most = found.most_common(1)[0]
        return source if most else "computed"
