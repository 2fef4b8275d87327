"""Engines that die at any byte of their answer: no output is lost, none comes twice, and what broke says so."""

import asyncio
import json
import random
import socket

import httpx
import pytest
from proxy_fakes import Cluster, FakeEngine, events, text_of, turn

from vllm_kvtier.proxy.config import EngineAddress


class CutEngine:
    """Answers every request with the first ``cut`` of the same bytes, then resets or ends the connection."""

    def __init__(self, name: str, *, stream: bool, chunked: bool = True):
        self.name = name
        self.texts = [f"{name}-{i};" for i in range(3)]
        if stream:
            chunks = [{"id": "x", "choices": [{"text": text}]} for text in self.texts]
            self.pieces = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]
        else:
            self.pieces = [json.dumps({"id": "x", "choices": [{"text": "".join(self.texts)}]}).encode()]
        kind = b"text/event-stream" if stream else b"application/json"
        length = sum(map(len, self.pieces))
        self.head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n"
        self.head += b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: %d\r\n\r\n" % length
        body = b"".join(self.pieces)
        if chunked:
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in self.pieces) + b"0\r\n\r\n"
        self.whole = self.head + body
        self.cut = len(self.whole)
        self.reset = True
        self.asked = 0

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def kill(self):
        self._server.close()

    async def _serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if head.startswith(b"get "):  # a health probe
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            writer.close()
            return
        await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        self.asked += 1
        writer.write(self.whole[: self.cut])
        await writer.drain()
        if self.reset and self.cut < len(self.whole):
            # What is on its way is there before the reset, which would else throw it away.
            await asyncio.sleep(0.001)
            writer.transport.abort()
        else:
            writer.close()


class Cut(Cluster):
    """Two such decode engines; the first gets the request first, and is healthy again before each request."""

    def __init__(self, **how):
        super().__init__(p=0, d=0, decode=(EngineAddress("http://unused:1"),), backoff_initial=60, backoff_max=60)
        self.how = how

    async def __aenter__(self):
        await super().__aenter__()
        self._options.pop("decode")
        self.d = [await CutEngine(name, **self.how).start() for name in ("D0", "D1")]
        self.core.apply(self.config())
        return self

    def again(self, cut: int) -> CutEngine:
        for engine in self.core.decode:
            engine.succeeded()
        self.core.decode[0].weighted_picks, self.core.decode[1].weighted_picks = 0, 1e9
        self.d[0].cut, self.d[0].asked, self.d[1].asked = cut, 0, 0
        return self.d[0]


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
async def test_stream_cut_at_any_byte_is_retried_or_ends_with_error(chunked, reset):
    async with Cut(stream=True, chunked=chunked) as c:
        first = c.d[0]
        first.reset = reset
        seen = set()
        for cut in range(len(first.whole) + 1):
            c.again(cut)
            reply = await asyncio.wait_for(c.chat(f"u{cut}", stream=True), 10)
            assert reply.status_code == 200, cut
            text = text_of(b"".join(part + b"\n\n" for part in reply.content.split(b"\n\n") if b"error" not in part))
            broken = b'"error"' in reply.content
            assert events(reply.content)[-1] == "[DONE]", cut
            if text.startswith("D1"):
                # Nothing of the first had gone out, though some of it may have come with the news of its death.
                assert text == "".join(c.d[1].texts) and not broken and cut < len(first.whole), cut
                seen.add("other")
                continue
            # Whole events of the first, from its beginning, none twice, and an error unless it was all.
            assert text in ["".join(first.texts[:n]) for n in (1, 2, 3)] and c.d[1].asked == 0, cut
            first_event = len(first.head) + len(first.pieces[0])
            assert cut >= first_event, cut
            assert broken or (text == "".join(first.texts) and b"[DONE]\n\n" in first.whole[:cut]), cut
            seen.add("broken" if broken else "all")
        assert seen == {"other", "broken", "all"}
        assert all(engine.outstanding == 0 for engine in c.core.decode)


async def test_stream_ending_early_without_last_event_is_an_error():
    """As an engine's that is shut down politely: HTTP is content, but the last event is missing."""
    async with Cut(stream=True) as c:
        early = c.d[0]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in early.pieces[:2]) + b"0\r\n\r\n"
        early.whole = early.head + body
        c.again(len(early.whole))
        reply = await c.chat("u", stream=True)
        *chunks, error, done = events(reply.content)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == early.texts[:2]
        assert error["error"]["code"] == 502 and done == "[DONE]"
        # Before its first event there is time for another.
        early.whole = early.head + b"0\r\n\r\n"
        c.again(len(early.whole))
        assert text_of((await c.chat("v", stream=True)).content) == "".join(c.d[1].texts)


@pytest.mark.parametrize("chunked", [True, False])
async def test_unstreamed_answer_cut_at_any_byte_comes_from_other_engine(chunked):
    async with Cut(stream=False, chunked=chunked) as c:
        whole = c.d[0].whole
        for cut in range(len(whole) + 1):
            c.again(cut)
            reply = await asyncio.wait_for(c.chat(f"u{cut}"), 10)
            text = reply.json()["choices"][0]["text"]
            name = text[:2]
            assert reply.status_code == 200 and text == "".join(f"{name}-{i};" for i in range(3)), cut
            assert name == ("D0" if cut == len(whole) else "D1") or cut > len(whole) - 5, cut


@pytest.mark.parametrize("chunked", [True, False])
async def test_broken_answer_is_never_taken_for_complete(chunked):
    """An answer of known length comes from the other engine; one of unknown length, begun, ends its connection."""
    async with Cut(stream=False, chunked=chunked) as c:
        whole, broke = c.d[0].whole, 0
        for cut in range(len(whole) + 1):
            c.again(cut)
            try:
                reply = await asyncio.wait_for(c.client.post("/v1/embeddings", json={"input": "x"}), 10)
            except httpx.RemoteProtocolError:
                assert chunked, cut
                broke += 1
                continue
            text = reply.json()["choices"][0]["text"]
            assert reply.status_code == 200 and text == "".join(f"{text[:2]}-{i};" for i in range(3)), cut
        assert bool(broke) == chunked
        assert all(engine.outstanding == 0 for engine in c.core.decode)


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_engine_death_at_any_byte_only_costs_its_work(stream):
    async with Cluster(p=1, d=1, backoff_initial=60, backoff_max=60) as c:
        cut_p = await CutEngine("P0", stream=False).start()
        c.p = [cut_p]
        c.core.apply(c.config())
        for cut in range(0, len(cut_p.whole) + 1, 3):
            c.core.prefill[0].succeeded()
            cut_p.cut = cut
            reply = await asyncio.wait_for(c.chat("u", stream=stream), 10)
            text = text_of(reply.content) if stream else reply.json()["choices"][0]["text"]
            assert text == "".join(c.d[0].text(turn("u"), i) for i in range(4 if stream else 1)), cut
        assert len(c.d[0].seen) == len(range(0, len(cut_p.whole) + 1, 3)), "D is asked once each time"


# ---------------------------------------------------------------- all of it at once


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_random_kills_reloads_and_drains_lose_no_output(seed):
    """Kills, reloads that add and remove engines, drains, small limits: every answer is whole, or a beginning that ends
    in an error, or a refusal that says when to come back; and at the end nothing is held."""
    rng = random.Random(seed)
    options = {"engine_requests": 3, "queue_limit": 4, "queue_timeout": 1.0, "first_byte_timeout": 5}
    async with Cluster(p=2, d=3, **options) as c:
        every = [*c.p, *c.d]
        outcomes = {"ok": 0, "broken": 0, "busy": 0, "failed": 0, "left": 0}
        over = asyncio.Event()

        async def client(i: int) -> None:
            for turn_number in range(12):
                texts = [f"client {i} turn {turn_number}"]
                stream = rng.random() < 0.6
                asked = asyncio.create_task(c.chat(*texts, stream=stream))
                if rng.random() < 0.1:
                    await asyncio.sleep(rng.random() * 0.02)
                    asked.cancel()
                    outcomes["left"] += 1
                    continue
                reply = await asyncio.wait_for(asked, 20)
                outcomes[judge(reply, texts, stream)] += 1

        def judge(reply, texts, stream) -> str:
            if reply.status_code == 429:
                assert int(reply.headers["retry-after"]) >= 1
                return "busy"
            if reply.status_code == 503:
                return "failed"
            assert reply.status_code == 200, reply.text
            text = (
                text_of(b"".join(p + b"\n\n" for p in reply.content.split(b"\n\n") if b'"error"' not in p))
                if (stream)
                else reply.json()["choices"][0]["text"]
            )
            engine = next((e for e in every if e.name == text[:2]), None)
            whole = "" if engine is None else "".join(engine.text(turn(*texts), k) for k in range(4 if stream else 1))
            if b'"error"' in reply.content:
                assert whole.startswith(text)
                return "broken"
            assert text == whole != ""
            return "ok"

        async def chaos() -> None:
            while not over.is_set():
                what = rng.choice(["kill", "kill", "reload", "drain"])
                if what == "kill":
                    engine = rng.choice([*c.p, *c.d])
                    await engine.kill()
                    await asyncio.sleep(rng.random() * 0.04)
                    await engine.start()
                elif what == "reload":
                    taken = c.d
                    c.d = rng.sample(taken, 2)
                    c.core.apply(c.config())
                    await asyncio.sleep(rng.random() * 0.04)
                    c.d = taken
                    c.core.apply(c.config())
                else:
                    engine = rng.choice(c.core.decode)
                    engine.drained = True
                    await asyncio.sleep(rng.random() * 0.02)
                    engine.drained = False
                    engine.on_change(engine)
                await asyncio.sleep(rng.random() * 0.04)

        chaos_task = asyncio.create_task(chaos())
        try:
            await asyncio.gather(*(client(i) for i in range(16)))
        finally:
            over.set()
            await chaos_task
        assert outcomes["ok"] > 60, outcomes
        await c.until(lambda: all(e.outstanding == 0 and e.tokens == 0 and e.healthy for e in c.core.fleet))
        await c.until(lambda: c.core.state()["leaving"] == [])
        assert sum(c.core.state()["waiting"].values()) == 0
        assert (await c.chat("and still")).status_code == 200


def test_fake_engine_texts_differ_by_engine_prompt_and_position():
    """The texts that the checks above go by differ by engine, prompt and position."""
    one, two = FakeEngine("D0"), FakeEngine("D1")
    texts = {e.text(turn(t), i) for e in (one, two) for t in ("a", "b") for i in range(4)}
    assert len(texts) == 16


async def test_fake_engine_that_is_dead_keeps_its_port():
    """No other process of the machine may answer there meanwhile, or take it from its next life."""
    engine = await FakeEngine("D0").start()
    for _ in range(2):
        await engine.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", engine.port))
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", engine.port))
        await engine.start()
    await engine.kill()
