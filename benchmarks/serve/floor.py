"""A server that computes nothing: its tokens leave at known times, and what is measured beyond them is the client's.

    python benchmarks/serve/floor.py --port 8123 --ttft 0.02 --itl 0.01

Speaks as much HTTP as the load generator needs: streamed completions and chats, /health, /v1/models, /metrics.
"""

import argparse
import asyncio
import json
import socket


class FloorServer:
    """``ttft``, ``itl``: seconds from having read a request to its first token, and from one to the next; tokens that
    are late do not delay those after them."""

    def __init__(self, ttft: float, itl: float):
        self.ttft, self.itl = ttft, itl
        self.port = 0
        self._server: asyncio.base_events.Server | None = None

    async def start(self, port: int = 0) -> "FloorServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                arrived = asyncio.get_running_loop().time()
                method, path, _ = head.split(" ", 2)
                lines = head.lower().split("\r\n")
                length = next((line[15:] for line in lines if line.startswith("content-length:")), 0)
                body = await reader.readexactly(int(length))
                if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
                    await self._generate(writer, json.loads(body), arrived, "chat" in path)
                else:
                    _answer(writer, *self._other(path))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client has gone
        finally:
            writer.close()

    @staticmethod
    def _other(path: str) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, '{"data": [{"id": "floor"}]}'
        return (200, "") if path in ("/health", "/metrics") else (404, "")

    async def _generate(self, writer: asyncio.StreamWriter, body: dict, arrived: float, chat: bool) -> None:
        loop = asyncio.get_running_loop()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        tokens = body.get("max_tokens", 16)
        for number in range(tokens):
            await asyncio.sleep(max(0.0, arrived + self.ttft + number * self.itl - loop.time()))
            choice = {"delta": {"content": "a "}} if chat else {"text": "a ", "token_ids": [1000 + number]}
            _event(writer, {"choices": [{"index": 0, **choice}]})
            await writer.drain()
        prompt = len(body.get("prompt", ()))
        _event(writer, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, event: dict) -> None:
    _chunk(writer, b"data: %b\n\n" % json.dumps(event).encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    reason = "OK" if status == 200 else "Not Found"
    writer.write(f"HTTP/1.1 {status} {reason}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ttft", type=float, default=0.02)
    parser.add_argument("--itl", type=float, default=0.01)
    args = parser.parse_args()
    await FloorServer(args.ttft, args.itl).start(args.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
