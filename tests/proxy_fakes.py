"""Engines that are none, on real sockets, for the proxy's tests; and a proxy in front of them.

All of it runs in the test's event loop, so a test steers an engine with plain asyncio events and nothing
sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import weakref
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from vllm_kvtier.proxy.app import create_app
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.routes.connections import BoundedProtocol


def bound(port: int) -> socket.socket:
    """A socket on loopback that does not listen yet. Several may have one port, and one of them listens."""
    # The protocol named, or asyncio leaves Nagle's algorithm on: 40 ms for every answer.
    made = socket.socket(proto=socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made


class QuietServer(uvicorn.Server):
    """A uvicorn server as a task of the running loop, without hands on the process's signals."""

    def __init__(self, app: Any, port: int = 0, lifespan: str = "off", **more: Any):
        # log_config: uvicorn's own would unhook caplog.
        options = {"access_log": False, "timeout_graceful_shutdown": 2, "log_config": None, "proxy_headers": False}
        options |= more
        super().__init__(uvicorn.Config(app, lifespan=lifespan, **options))
        self._socket = bound(port)
        self.port = self._socket.getsockname()[1]
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self):
        yield

    async def begin(self) -> None:
        self._socket.listen(64)  # connections queue from here on, so that tests need not wait for the start
        self._task = asyncio.create_task(self.serve(sockets=[self._socket]))

    async def main_loop(self) -> None:
        """As uvicorn's, which looks every 0.1 s whether it is to end."""
        await self.on_tick(0)
        await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, without its pauses of 0.1 s."""
        for server in (*self.servers, *(sockets or ())):
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with anyio.move_on_after(self.config.timeout_graceful_shutdown):
            while self.server_state.connections or self.server_state.tasks:
                await asyncio.sleep(0.001)
        await self.lifespan.shutdown()

    async def end(self) -> None:
        self._ending.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=10)

    async def kill(self) -> None:
        """As SIGKILL looks from outside: connections are reset, then refused."""
        while not self.started:
            await asyncio.sleep(
                0
            )  # closing a socket that the loop is about to register would confuse the loop
        for server in self.servers:
            server.close()
        self._socket.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


@dataclass
class Seen:
    """One generation request that reached an engine."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False


class FakeEngine:
    """Behaves like vLLM with the connector, as seen by the proxy.

    ``status``: of generation requests; ``refuses``: another one, at once, by their model. ``health``: of /health,
    ``health_hold``: as ``hold``, for it. ``hold``: if set, generation waits for it before the headers. ``gate``: if
    set, each streamed chunk takes one permit.
    ``stream_params``: put params on the last chunk (vLLM 0.33). ``null_params``: put nulls on the other chunks, as
    vLLM 0.33 does. ``kv_port``: of a real endpoint that its params name; otherwise they name none.
    ``tokenize_status``, ``tokenize_hold``: as the first two, for /tokenize, whose tokens are the prompt's bytes.
    ``api_key``: the bearer token that all routes but /health require. ``passed``: requests by routes that do not
    generate. ``breaks``: it breaks off streams behind their chunks. ``stream_error``: status of the error that is all
    of a stream, but for the role in a chat.
    ``late_error``: the last event of streams, which then wait for ``error_gate`` to end. ``ends``: it is shut down with
    --shutdown-timeout, and aborts new requests. ``roles``: so many events that name a role begin each stream.
    ``comments``: seconds between the comments that it sends while ``gate`` lets no chunk pass, as vLLM's with
    --sse-keep-alive-interval, and one before each stream and behind a role. ``commented``: how many it has sent.
    """

    def __init__(self, name: str):
        self.name = name
        self.status = 200
        self.refuses: dict[str, int] = {}
        self.health = 200
        self.health_hold: asyncio.Event | None = None
        self.hold: asyncio.Event | None = None
        self.gate: asyncio.Semaphore | None = None
        self.chunks = 4
        self.stream_params = True
        self.null_params = True
        self.returns_params = True
        self.seen: list[Seen] = []
        self.arrived = asyncio.Condition()
        self.probes = 0
        self.kv_port: int | None = None
        self.export: str | None = None
        self.tokenize_status = 200
        self.tokenize_hold: asyncio.Event | None = None
        self.tokenized: list[dict[str, Any]] = []
        self.api_key: str | None = None
        self.breaks = False
        self.stream_error: int | None = None
        self.late_error = ""
        self.error_gate: asyncio.Event | None = None
        self.ends = False
        self.roles = 0
        self.comments = 0.0
        self.commented = 0
        self.follow = False  # its params say that decode engines can follow its prefills
        self.passed: list[Seen] = []
        # Bound and not listening: while the engine is dead its port refuses connections, and is no other process's.
        self._reserved = bound(0)
        self.port = self._reserved.getsockname()[1]
        weakref.finalize(self, self._reserved.close)
        self._tls: dict[str, Any] = {}
        self._server: QuietServer | None = None
        self.instance = 0

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    async def start(self, **tls: Any) -> FakeEngine:
        """``tls``: uvicorn's ssl_ options."""
        self.instance += 1
        self._tls = tls or self._tls
        self._server = QuietServer(self._app(), self.port, **self._tls)
        self.port = self._server.port
        await self._server.begin()
        return self

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.kill()
            self._server = None

    async def until_seen(self, count: int) -> Seen:
        """The ``count``-th request (from 1), once it is there."""
        async with self.arrived:
            await asyncio.wait_for(self.arrived.wait_for(lambda: len(self.seen) >= count), 10)
        return self.seen[count - 1]

    def text(self, body: dict[str, Any], i: int) -> str:
        prompt = json.dumps(body.get("messages", body.get("prompt", body.get("token_ids"))), sort_keys=True)
        return f"{self.name}/{hashlib.sha256(prompt.encode()).hexdigest()[:12]}/{i};"

    def params(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if not self.returns_params:
            return None
        is_prefill = body.get("sampling_params", body).get("max_tokens") == 1
        return {
            "do_remote_prefill": is_prefill,
            "do_remote_decode": not is_prefill,
            "remote_engine_id": f"id-{self.name}-{self.instance}",
            "remote_request_id": f"r{len(self.seen)}",
            "remote_host": "127.0.0.1",
            "remote_port": self.kv_port or 40000 + self.port % 20000,
            "remote_block_ids": None,
            "kvtier": {
                "v": 1,
                "engine_id": f"id-{self.name}-{self.instance}",
                "export": self.export or f"secret-export-{self.name}-{len(self.seen)}",
                "num_tokens": 7,
                "digest": "00ff",
                "pulled_tokens": 5,
                "pulled_from": "10.9.8.7:4321",
                "local_tokens": 1,
                "computed_tokens": 1,
                **({"can_follow": True} if self.follow else {}),
            },
        }

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health():
            self.probes += 1
            if self.health_hold is not None:
                await self.health_hold.wait()
            return JSONResponse({}, self.health)

        @app.get("/v1/models")
        async def models(request: Request):
            return {"data": [{"id": self.name, "auth": request.headers.get("authorization")}]}

        @app.post("/tokenize")
        async def tokenize(request: Request):
            body = await request.json()
            self.tokenized.append(body)
            if self.tokenize_hold is not None:
                await self.tokenize_hold.wait()
            if self.tokenize_status != 200:
                return JSONResponse({"error": {"message": f"{self.name} says no"}}, self.tokenize_status)
            prompt = body["prompt"] if "prompt" in body else "".join(m["content"] for m in body["messages"])
            tokens = list(prompt.encode())
            return {"tokens": tokens, "count": len(tokens), "max_model_len": 1000, "token_strs": None}

        @app.post("/v1/embeddings")
        @app.post("/v1/responses")
        @app.get("/v1/responses/{rest:path}")
        @app.post("/v1/responses/{rest:path}")
        @app.post("/v1/audio/transcriptions")
        @app.post("/v1/messages")
        @app.post("/cohere/v2/chat")
        @app.post("/cohere/v2/chat/render")
        @app.post("/v1/decisions")
        @app.post("/v1/systemone")
        @app.post("/v2/rerank")
        @app.post("/sleep")
        @app.post("/custom")
        async def passed(request: Request):
            raw = await request.body()
            is_json = request.headers.get("content-type") == "application/json" and raw.startswith(b"{")
            seen = Seen(request.url.path, json.loads(raw) if is_json else raw, dict(request.headers))
            self.passed.append(seen)
            if self.hold is not None and not await self._held(request, seen):
                return JSONResponse({}, 499)
            if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
                return JSONResponse({"error": {"message": "no key"}}, 401)
            if self.status != 200:
                return JSONResponse({"error": {"message": f"{self.name} says {self.status}"}}, self.status)
            if is_json and seen.body.get("stream"):
                return StreamingResponse(self._stream(seen), media_type="text/event-stream")
            made = f"resp_{self.name}{len(self.passed)}"
            return {"id": made, "engine": self.name, "query": str(request.query_params)}

        @app.post("/inference/v1/generate")
        @app.post("/v1/chat/completions")
        @app.post("/v1/completions")
        async def generate(request: Request):
            seen = Seen(request.url.path, await request.json(), dict(request.headers))
            self.seen.append(seen)
            async with self.arrived:
                self.arrived.notify_all()
            if (status := self.refuses.get(seen.body.get("model"))) is not None:
                return JSONResponse({"error": {"message": f"{self.name} says {status}"}}, status)
            if self.hold is not None and not await self._held(request, seen):
                return JSONResponse({}, 499)
            if self.api_key and seen.headers.get("authorization") != f"Bearer {self.api_key}":
                return JSONResponse({"error": {"message": "no key"}}, 401)
            if self.status != 200:
                return JSONResponse({"error": {"message": f"{self.name} says {self.status}"}}, self.status)
            if seen.body.get("stream"):
                return StreamingResponse(self._stream(seen), media_type="text/event-stream")
            seen.finished = True
            if self.ends:
                empty = {"message": {"role": "assistant", "content": ""}} if "messages" in seen.body else {"text": ""}
                return {"id": "x", "choices": [{"index": 0, **empty, "finish_reason": "abort"}]}
            return {
                "id": "x",
                "object": "whole",
                "model": seen.body.get("model"),
                "choices": [{"text": self.text(seen.body, 0), "logprob": 1e-05}],
                "kv_transfer_params": self.params(seen.body),
            }

        return app

    async def _held(self, request: Request, seen: Seen) -> bool:
        """True when ``hold`` is set, False (and marked) when the client leaves first."""
        hold = asyncio.ensure_future(self.hold.wait())
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait((hold, gone), return_when=asyncio.FIRST_COMPLETED)
        if not hold.done():
            seen.aborted.set()
        hold.cancel()
        gone.cancel()
        return not seen.aborted.is_set()

    async def _stream(self, seen: Seen):
        try:
            if self.comments:
                yield await self._comment()
            if self.ends:
                if "messages" in seen.body:
                    yield 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
                    if self.comments:
                        yield await self._comment()
                empty = '"delta":{"content":""}' if "messages" in seen.body else '"text":""'
                yield f'data: {{"id":"x","choices":[{{"index":0,{empty},"finish_reason":"abort"}}]}}\n\n'
            for _ in range(self.roles):
                yield 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
            for i in range(0 if self.stream_error or self.ends else self.chunks):
                if self.gate is not None:
                    while self.comments and self.gate.locked():
                        await asyncio.sleep(self.comments)
                        yield await self._comment()
                    await self.gate.acquire()
                await asyncio.sleep(0)  # uvicorn's send does not yield once the client has gone
                last = i == self.chunks - 1
                chunk = {
                    "id": "x",
                    "object": "chunk",
                    "model": "m",
                    "choices": [{"text": self.text(seen.body, i)}],
                }
                if last and self.stream_params:
                    chunk["kv_transfer_params"] = self.params(seen.body)
                elif self.null_params:
                    chunk["kv_transfer_params"] = None
                yield f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
            if self.breaks:
                raise ConnectionAbortedError(f"{self.name} breaks off, as a test wants it")
            if self.stream_error:
                if "messages" in seen.body:
                    yield 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
                    await asyncio.sleep(0.01)
                yield f"data: {json.dumps({'error': {'message': 'it died', 'code': self.stream_error}})}\n\n"
            if self.late_error:
                yield self.late_error
                if self.error_gate is not None:
                    await self.error_gate.wait()
            yield "data: [DONE]\n\n"
            seen.finished = True
        except asyncio.CancelledError:
            seen.aborted.set()
            raise

    async def _comment(self) -> str:
        await asyncio.sleep(0.01)  # so that it is a piece of its own
        self.commented += 1
        return ": keep-alive\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


class Cluster:
    """``p``, ``d`` and ``pooling`` engines, the proxy, and its client; ``released`` gets the released exports.

    Short prompts are prefilled, too, as those of most tests are short: ``min_prefill_chars`` is 0, not its default.
    ``probe_on_start``: the proxy probes the engines at its start. ``kv``: (host, port) of all decode engines'
    endpoints, as in the operator's options. ``real_release``: releases are sent to the endpoints that the engines name.
    ``engine``: options of all engines.
    """

    def __init__(self, p: int = 1, d: int = 1, pooling: int = 0, **options: Any):
        self.p = [FakeEngine(f"P{i}") for i in range(p)]
        self.d = [FakeEngine(f"D{i}") for i in range(d)]
        self.pooling = [FakeEngine(f"E{i}") for i in range(pooling)]
        self.released: asyncio.Queue[Any] = asyncio.Queue()
        defaults = {"backoff_initial": 0.02, "backoff_max": 0.1, "connect_timeout": 20.0, "min_prefill_chars": 0}
        self._options = defaults | options
        self._kv = self._options.pop("kv", None)
        self._real_release = self._options.pop("real_release", False)
        self._probe_on_start = self._options.pop("probe_on_start", False)

    async def __aenter__(self) -> Cluster:
        for engine in (*self.p, *self.d, *self.pooling):
            await engine.start()
        release = None if self._real_release else self.released.put
        self.app = create_app(self.config(), release=release, probe_on_start=self._probe_on_start)
        self._proxy = QuietServer(self.app, lifespan="on", http=BoundedProtocol)
        await self._proxy.begin()
        while self.app.core is None:
            await asyncio.sleep(0)
        self.url = f"http://127.0.0.1:{self._proxy.port}"
        self.client = httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False, verify=False)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.aclose()
        await self._proxy.end()
        for engine in (*self.p, *self.d, *self.pooling):
            await engine.kill()

    def config(self, **changes: Any) -> ProxyConfig:
        """The configuration with ``changes``. ``engine``: options of all engines; ``kv`` of all decode engines."""
        options = self._options | changes
        engine = options.pop("engine", {})
        kv = dict(zip(("kv_host", "kv_port"), self._kv, strict=True)) if self._kv else {}
        engines = {
            "prefill": tuple(EngineAddress(e.url, **engine) for e in self.p),
            "decode": tuple(EngineAddress(e.url, **kv, **engine) for e in self.d),
            "pooling": tuple(EngineAddress(e.url, **engine) for e in self.pooling),
        }
        return ProxyConfig(**(engines | options))

    @property
    def core(self):
        return self.app.core

    @property
    def requests(self) -> set[asyncio.Task[None]]:
        """The proxy's tasks for requests under way, which uvicorn cancels at its end."""
        return set(self._proxy.server_state.tasks)

    async def chat(self, *texts: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """A turn whose messages alternate between user and assistant."""
        return await self.client.post(
            "/v1/chat/completions", json=turn(*texts, **fields), headers=headers or {}
        )

    async def until(self, condition, seconds: float = 10) -> None:
        """Wait for state of the proxy that has no event."""
        with anyio.fail_after(seconds):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.contextmanager
def unanswered(port: int):
    """Connections to ``port`` are neither taken nor refused: the backlog of its listener is full."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(bound(port))
        listener.listen(0)
        for filler in [sockets.enter_context(socket.socket()) for _ in range(3)]:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield


def turn(*texts: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    roles = ("user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)],
    } | fields


def events(raw: bytes) -> list[Any]:
    """The data of all events of a stream, JSON decoded; "[DONE]" as it is."""
    data = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]
    return [part.decode() if part == b"[DONE]" else json.loads(part) for part in data]


ALONE = {"do_remote_prefill": False, "do_remote_decode": False, "kvtier": {"sources": []}}


def alone(seen: Seen) -> bool:
    """Whether this decode engine was to compute the prompt, without sources."""
    return seen.body["kv_transfer_params"] == ALONE


def text_of(raw: bytes) -> str:
    """The text of a streamed answer."""
    return "".join(e["choices"][0]["text"] for e in events(raw) if e != "[DONE]" and e.get("choices"))
