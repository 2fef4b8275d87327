"""Engines that compute nothing, for benchmarks of proxies: lean, so that what is measured is the proxy.

They answer as vLLM with the connector does as far as a proxy can tell: a probe for one token with params, everything
else with a stream of events whose text says which engine sent it, for which prompt, in which order. ``kill`` looks from
outside as SIGKILL does: connections are reset, then refused.
"""

import asyncio
import hashlib
import json

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"


def text(name: str, prompt: object, i: int) -> str:
    """The i-th piece of an engine's answer to a prompt."""
    digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()[:12]
    return f"{name}/{digest}/{i};"


class LeanEngine:
    """One engine on a port of its own. ``chunks``: events of a stream; ``pause``: seconds between two of them."""

    def __init__(self, name: str, chunks: int, pause: float = 0.0):
        self.name = name
        self.chunks = chunks
        self.pause = pause
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._served = 0

    async def start(self) -> "LeanEngine":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 22)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def kill(self) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, rest = head.partition(b"content-length:")
                body = await reader.readexactly(int(rest.split(b"\r\n")[0])) if rest else b""
                await self._answer(writer, head, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the proxy closed the connection, or this engine was killed
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        if head.startswith(b"get "):
            writer.write(HEAD % b"application/json" + b"content-length: 2\r\n\r\n{}")
            return
        asked = json.loads(body)
        prompt = asked.get("messages", asked.get("prompt"))
        self._served += 1
        if not asked.get("stream"):
            choices = [{"text": text(self.name, prompt, 0)}]
            data = json.dumps({"id": "x", "choices": choices, "kv_transfer_params": self._params()}).encode()
            writer.write(HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(data) + data)
            return
        writer.write(HEAD % b"text/event-stream; charset=utf-8" + b"transfer-encoding: chunked\r\n\r\n")
        for i in range(self.chunks):
            choices = [{"text": text(self.name, prompt, i)}]
            chunk = {"id": "x", "model": "m", "choices": choices, "kv_transfer_params": None}
            data = f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await asyncio.sleep(self.pause)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def _params(self) -> dict:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.name,
            "remote_request_id": f"r{self._served}",
            "remote_block_ids": [[1, 2, 3]],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
        }
