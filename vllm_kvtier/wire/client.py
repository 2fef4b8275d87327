"""An asynchronous client of engines' endpoints, for processes that are no engines: the proxy, tools, tests.

    async with AsyncEndpointClient() as client:
        holding = await client.query("127.0.0.1", 5601, token_ids)
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from vllm_kvtier.errors import PeerRefused
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import resolved

MAX_CONNECTIONS = 256  # engines come and go, each at another address; of more, those that are unused for longest end

Question = m.Query | m.Inspect | m.PinPrompt | m.Warm | m.Explain | m.GetIdentity
_Result = TypeVar("_Result")
Answer = TypeVar("Answer", m.PrefixLengths, m.Inspection, m.PinResult, m.Explanation, m.Identity)


@dataclass(eq=False)
class _Connection:
    """``socket``: None until it is needed. ``users``: exchanges and releases under way."""

    address: tuple[str, int]
    socket: zmq.asyncio.Socket | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0

    def close(self, linger: int | None = None) -> None:
        if self.socket is not None:
            self.socket.close(linger)
            self.socket = None


class AsyncEndpointClient:
    """Connections are made when first used and kept, up to ``MAX_CONNECTIONS``; safe for concurrent use on one event
    loop."""

    def __init__(self, key: ClusterKey | None = None, timeout: float = 2.0):
        self._key, self._timeout = key, timeout
        self._context = zmq.asyncio.Context()
        self._connections: dict[tuple[str, int], _Connection] = {}  # the one used last is last
        self._ids = itertools.count(1)

    async def __aenter__(self) -> "AsyncEndpointClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._context.term()

    async def release(self, host: str, port: int, export: str) -> None:
        """Tell an engine that no decode engine will pull this export. Best effort: the export expires anyway.

        Raises PeerRefused if the address is invalid, TimeoutError if no connection accepts the message in time.
        """
        with self._using((host, port)) as connection:
            await self._in_time(self._send(connection, m.ReleaseExport(export)))

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
        with self._using(address) as connection:
            async with connection.lock:
                try:
                    return await self._in_time(self._ask(connection, question, kind))
                except (msgspec.DecodeError, msgspec.ValidationError) as error:
                    connection.close()
                    raise PeerRefused(f"{address[0]}:{address[1]} sent a malformed answer: {error}") from error
                except (TimeoutError, asyncio.CancelledError):
                    # An engine that takes nothing would be sent questions of megabytes when it does again.
                    connection.close(linger=0)
                    raise

    async def _in_time(self, work: Awaitable[_Result]) -> _Result:
        """Raises TimeoutError."""
        try:
            return await asyncio.wait_for(work, self._timeout)
        except asyncio.TimeoutError as error:  # another class than TimeoutError before Python 3.11
            raise TimeoutError("no answer in time") from error

    async def _ask(self, connection: _Connection, question: Question, kind: type[Answer]) -> Answer:
        socket = await self._send(connection, question)
        while True:
            answer = m.decode_engine(await socket.recv())
            if isinstance(answer, kind) and answer.question == question.question:
                return answer  # others are late answers to questions that timed out
            if isinstance(answer, m.LeaseRefused):
                host, port = connection.address
                raise PeerRefused(f"{host}:{port} refused: {answer.reason}")

    @contextlib.contextmanager
    def _using(self, address: tuple[str, int]) -> Iterator[_Connection]:
        connection = self._connections.pop(address, None)
        if connection is None:
            connection = _Connection(address)
            for other in [other for other in self._connections.values() if not other.users]:
                if len(self._connections) < MAX_CONNECTIONS:
                    break
                other.close()
                del self._connections[other.address]
        self._connections[address] = connection
        connection.users += 1
        try:
            yield connection
        finally:
            connection.users -= 1

    async def _send(self, connection: _Connection, message: m.ReleaseExport | Question) -> zmq.asyncio.Socket:
        """Send, on a new socket if there is none. Raises PeerRefused."""
        host, port = connection.address
        try:
            if connection.socket is None:
                endpoint = await asyncio.get_running_loop().run_in_executor(None, resolved, host, port)
                connection.socket = connection.socket or self._opened(endpoint)
        except (zmq.ZMQError, OSError, ValueError) as error:
            raise PeerRefused(f"no connection to {host}:{port} can be made: {error}") from error
        await connection.socket.send(m.encode(message))
        return connection.socket

    def _opened(self, endpoint: str) -> zmq.asyncio.Socket:
        """Raises zmq.ZMQError."""
        with contextlib.ExitStack() as cleanup:
            socket = self._context.socket(zmq.DEALER)
            cleanup.callback(socket.close)
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.SNDHWM, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)  # else ten times a second, to engines that are gone
            socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE)
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            if self._key is not None:
                self._key.secure_client(socket)
            socket.connect(endpoint)
            cleanup.pop_all()
        return socket
