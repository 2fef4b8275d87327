"""An asynchronous client of engines' endpoints, for processes that are no engines: the proxy, tools, tests.

    async with AsyncEndpointClient() as client:
        holding = await client.query("127.0.0.1", 5601, token_ids)
"""

import asyncio
import itertools
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from vllm_kvtier.errors import PeerRefused
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey

Question = m.Query | m.Inspect | m.PinPrompt | m.Warm | m.Explain | m.GetIdentity
Answer = TypeVar("Answer", m.PrefixLengths, m.Inspection, m.PinResult, m.Explanation, m.Identity)


class AsyncEndpointClient:
    """Connections are made when first used and kept; safe for concurrent use on one event loop."""

    def __init__(self, key: ClusterKey | None = None, timeout: float = 2.0):
        self._key, self._timeout = key, timeout
        self._context = zmq.asyncio.Context()
        self._sockets: dict[tuple[str, int], zmq.asyncio.Socket] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._ids = itertools.count(1)

    async def __aenter__(self) -> "AsyncEndpointClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for address in list(self._sockets):
            self._drop(address)
        self._context.term()

    async def release(self, host: str, port: int, export: str) -> None:
        """Tell an engine that no decode engine will pull this export. Best effort: the export expires anyway.

        Raises TimeoutError if no connection accepts the message in time.
        """
        socket = self._socket((host, port))
        await asyncio.wait_for(socket.send(m.encode(m.ReleaseExport(export))), self._timeout)

    async def query(self, host: str, port: int, tokens: list[int], cache_salt: str = "") -> m.PrefixLengths:
        """The prefix lengths that the engine holds for a prompt of these token ids. The engine computes nothing.

        Raises PeerRefused with the engine's reason, or TimeoutError if it does not answer in time.
        """
        query = m.Query(next(self._ids), tokens, cache_salt)
        return await self._exchange((host, port), query, m.PrefixLengths)

    async def inspect(self, host: str, port: int) -> m.Inspection:
        """Counts of what the engine holds and leases to others now. Raises as ``query`` does."""
        return await self._exchange((host, port), m.Inspect(next(self._ids)), m.Inspection)

    async def keep(
        self, host: str, port: int, tokens: list[int], cache_salt: str = "", pinned: bool = True
    ) -> m.PinResult:
        """Pin or unpin the blocks of this prompt in the engine's node store. Raises as ``query`` does."""
        question = m.PinPrompt(next(self._ids), tokens, cache_salt, pinned)
        return await self._exchange((host, port), question, m.PinResult)

    async def warm(self, host: str, port: int, tokens: list[int], cache_salt: str = "") -> m.PinResult:
        """Have the engine's node store promote the blocks of a prompt that will come. Raises as ``query`` does."""
        return await self._exchange((host, port), m.Warm(next(self._ids), tokens, cache_salt), m.PinResult)

    async def _exchange(self, address: tuple[str, int], question: Question, kind: type[Answer]) -> Answer:
        async with self._locks.setdefault(address, asyncio.Lock()):
            try:
                return await asyncio.wait_for(self._ask(address, question, kind), self._timeout)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                self._drop(address)
                raise PeerRefused(f"{address[0]}:{address[1]} sent a malformed answer: {error}") from error

    async def _ask(self, address: tuple[str, int], question: Question, kind: type[Answer]) -> Answer:
        socket = self._socket(address)
        await socket.send(m.encode(question))
        while True:
            answer = m.decode_engine(await socket.recv())
            if isinstance(answer, kind) and answer.question == question.question:
                return answer  # others are late answers to questions that timed out
            if isinstance(answer, m.LeaseRefused):
                raise PeerRefused(f"{address[0]}:{address[1]} refused: {answer.reason}")

    def _socket(self, address: tuple[str, int]) -> zmq.asyncio.Socket:
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.SNDHWM, 100)
            socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE)
            if self._key is not None:
                self._key.secure_client(socket)
            socket.connect(f"tcp://{address[0]}:{address[1]}")
            self._sockets[address] = socket
        return socket

    def _drop(self, address: tuple[str, int]) -> None:
        socket = self._sockets.pop(address, None)
        if socket is not None:
            socket.close()
