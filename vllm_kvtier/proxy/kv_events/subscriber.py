"""Follows one engine's KV events (vLLM's ZMQ publisher) and keeps its ``BlockIndex`` up to date.

Batches are numbered. A gap is filled from the publisher's replay socket, if it has one; so are the events from before
the proxy's start. What cannot be replayed is lost, which costs worse choices of an engine and nothing else.

A restarted engine numbers from 0 again, or does not have the last applied batch in its replay: its index begins anew.
Nothing here waits for the engine longer than ``_REPLAY_SECONDS``, and no request waits for this.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.kv_events import messages
from vllm_kvtier.proxy.kv_events.index import BlockIndex

logger = get_logger(__name__)

_REPLAY_SECONDS = 2.0  # for each message of a replay; vLLM looks for requests ten times a second
_REPLAY_BACKOFF = 10.0  # after one without an answer
_MAX_REPLAYS = 32  # vLLM's socket drops what a slow reader does not take: the rest is requested again
_MAX_QUEUED = 10_000  # batches in the socket; what is above is dropped, and replayed
_MAX_BATCH_BYTES = 64 << 20
_RESTART_SECONDS = 1.0

#: What is counted, in batches but for ``malformed_events``, ``replay_timeouts`` and ``restarts``.
OUTCOMES = ("applied", "replayed", "lost", "malformed", "malformed_events", "replay_timeouts", "restarts")


class EventSubscriber:
    """``address``, ``replay``: HOST:PORT or ipc://PATH. ``counts``: batches by outcome. Runs from ``start`` until
    ``aclose``."""

    def __init__(self, context: zmq.asyncio.Context, address: str, replay: str | None, index: BlockIndex):
        self.address = address
        self.index = index
        self.counts: Counter[str] = Counter()
        #: Whether anything has arrived: otherwise the index says nothing.
        self.live = False
        self._replay_address = replay
        self._context = context
        self._next: int | None = None  # number of the next batch; None: nothing is applied yet
        self._time = 0.0  # the engine's clock in the last applied batch
        self._no_replay_before = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"kv events {self.address}")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except zmq.ZMQError as error:
                logger.warning("kvtier: proxy: KV events of %s failed (%s); connecting again", self.address, error)
                await asyncio.sleep(_RESTART_SECONDS)

    async def _follow(self) -> None:
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
            socket.setsockopt(zmq.LINGER, 0)
            # A machine that vanishes closes no connection.
            socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            try:
                _connect(socket, self.address)
                while True:
                    ready = dict(await poller.poll())
                    if monitor in ready:
                        await monitor.recv_multipart()
                        await self._replay()  # of what was published without a connection
                    if socket in ready:
                        await self.on_message(await socket.recv_multipart())
                        await asyncio.sleep(0)  # requests come first
            finally:
                socket.disable_monitor()
                monitor.close(linger=0)

    async def on_message(self, frames: list[bytes]) -> None:
        """A message of the publisher: topic, number, batch."""
        number, batch = _read(frames)
        if number is None:
            self.counts["malformed"] += 1
            return
        if self._next is not None and number < self._next and batch is not None:
            if batch.time <= self._time:
                return  # it was replayed
            self._begin_anew()
            await self._replay()
        if number > (self._next or 0):
            await self._replay()
        if self._next is not None and number < self._next:
            return
        if self._next is not None and number > self._next:
            self._lose(number)
        self._apply(number, batch)

    def _apply(self, number: int, batch: messages.Batch | None, outcome: str = "applied") -> None:
        self.live = True
        if self._next is None and number:  # what the engine had before is not announced again while it is there
            self.index.lost_events()
        self._next = number + 1
        if batch is None:
            self.counts["malformed"] += 1
            return
        self.counts[outcome] += 1
        self.counts["malformed_events"] += batch.malformed
        self._time = batch.time
        try:
            self.index.apply(batch.events)
        except Exception:  # events such as no engine sends must not end this task, and leave the index as it is
            logger.exception("kvtier: proxy: a batch of KV events of %s is left out; its index is empty", self.address)
            self.counts["malformed"] += 1
            self.index.invalidate()

    def _lose(self, number: int) -> None:
        """The batches before ``number`` cannot be had."""
        self.counts["lost"] += number - self._next
        self.index.lost_events()
        self._next = number

    def _begin_anew(self) -> None:
        logger.info("kvtier: proxy: the engine with KV events at %s has restarted; its index is empty", self.address)
        self.counts["restarts"] += 1
        self.index.clear()
        self._next = None

    # -- replay ------------------------------------------------------------------------------------------------------

    async def _replay(self) -> None:
        """Apply what the publisher still has after the last applied batch."""
        if self._replay_address is None or time.monotonic() < self._no_replay_before:
            return
        for _ in range(_MAX_REPLAYS):
            before = self._next
            try:
                if await self._replay_once():
                    return
            except TimeoutError:
                if self._next == before:
                    self.counts["replay_timeouts"] += 1
                    self._no_replay_before = time.monotonic() + _REPLAY_BACKOFF
                    return

    async def _replay_once(self) -> bool:
        """True: to its end. Otherwise there is more to request. Raises TimeoutError."""
        # From the last applied batch on, by which a restarted engine is recognised.
        begin = 0 if self._next is None else max(0, self._next - 1)
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
            _connect(socket, self._replay_address)
            async with time_limit(_REPLAY_SECONDS):  # it waits without end if the handshake was refused
                await socket.send_multipart([b"", begin.to_bytes(8, "big")])

            async def receive() -> list[bytes]:
                async with time_limit(_REPLAY_SECONDS):
                    return await socket.recv_multipart()

            return await self._take_replay(receive)

    async def _take_replay(self, receive: Callable[[], Awaitable[list[bytes]]]) -> bool:
        """Apply the answer to a request for what follows the last applied batch, and that batch itself."""
        applied, is_first = 0, True
        while True:
            number, batch = _read(await receive())
            is_known = is_first and self._next is not None
            is_first = False
            if number is None:  # the end; vLLM sends -1
                if is_known:
                    self._begin_anew()
                return not is_known
            if is_known and batch is not None and number == self._next - 1 and batch.time != self._time:
                self._begin_anew()
                return False
            if self._next is not None and number > self._next:
                if applied:
                    return False
                self._lose(number)  # not even at the beginning of a replay
            if self._next is None or number >= self._next:
                self._apply(number, batch, "replayed")
                applied += 1
            await asyncio.sleep(0)


def _connect(socket: zmq.asyncio.Socket, address: str) -> None:
    # Not for names: one with addresses of both kinds would be connected by IPv6, where vLLM's publisher does not
    # listen.
    socket.setsockopt(zmq.IPV6, address.startswith("["))
    socket.connect(address if "://" in address else f"tcp://{address}")


def _read(frames: list[bytes]) -> tuple[int | None, messages.Batch | None]:
    """(number, batch) of the last two frames. No number: not a batch, or the end of a replay."""
    if len(frames) < 2 or len(frames[-2]) != 8 or (number := int.from_bytes(frames[-2], "big", signed=True)) < 0:
        return None, None
    return number, messages.decode(frames[-1])
