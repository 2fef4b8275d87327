"""Queries to an engine's endpoint (of its connector, not vLLM's server).

``GetIdentity`` returns the engine's identity as text. The namespace is only compared: the engine refuses a handshake
with the first field that differs. ``identity`` therefore learns one field per handshake, starting with values that no
engine has, until the engine accepts and sends its cache layout. That costs the engine one message per field.
"""

import contextlib
import itertools
import os
import re
import socket
import time
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import resolved

_NO_NUMBER = 1 << 39  # of a namespace's counts
_NO_NAME = "?doctor?"
_FAILED = {zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL}


class NoEndpoint(KVTierError):
    """``why``: closed | key needed | no key there | other key | not ours | other version | busy | silent."""

    def __init__(self, why: str, message: str):
        super().__init__(message)
        self.why = why


class Starting(KVTierError):
    """The engine answers but has no namespace yet: it is starting, or its workers cannot serve. Its own message."""


@dataclass(frozen=True)
class Identity:
    """``fields``: the namespace's fields that engines compare. ``ranks``: the cache layout of each rank.
    ``description``: the engine's text on what they are derived from; may be {}."""

    instance: str
    fields: dict[str, str | int]
    ranks: list[m.RankInfo]
    description: dict[str, str] = field(default_factory=dict)
    hash_block_size: int = 0  # tokens of a block hash; shorter prompts are never shared. 0 if not known


def parse_address(text: str) -> tuple[str, int]:
    """Raises KVTierError if it is not HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or re.fullmatch("[0-9]{1,5}", port) is None or not 0 < int(port) < 65536:
        raise KVTierError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


class EndpointProbe:
    """A connection to an endpoint; ``close`` it. Every query raises NoEndpoint if it is not answered."""

    def __init__(self, address: str, key: ClusterKey | None = None, seconds: float = 3.0):
        """Raises KVTierError if ``address`` is not HOST:PORT, or no host can have that name."""
        self.address = address
        self._host, self._port = parse_address(address)
        try:
            endpoint = resolved(self._host, self._port)
        except OSError:  # ZMQ cannot either, and ``_no_answer`` says why
            endpoint = f"tcp://{self._host}:{self._port}"
        except ValueError as error:
            raise KVTierError(f"{address!r} is not HOST:PORT: {error}") from error
        self._key, self._seconds = key, seconds
        self._ids = itertools.count(1)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE)
        if key is not None:
            key.secure_client(self._socket)
        self._monitor = self._socket.get_monitor_socket()
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise KVTierError(f"{address!r} is not HOST:PORT: {error.strerror}") from error

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def __enter__(self) -> "EndpointProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inspection(self) -> m.Inspection:
        return self._query(m.Inspect(next(self._ids)), m.Inspection)

    def explanation(self, tokens: list[int], salt: str, adapter: str = "") -> m.Explanation:
        return self._query(m.Explain(next(self._ids), tokens, salt, adapter), m.Explanation)

    def description(self) -> dict[str, str]:
        """See ``Identity.description``."""
        return dict(self._query(m.GetIdentity(next(self._ids)), m.Identity).parts)

    def _query(self, question, kind: type):
        return self._ask(question, lambda a: isinstance(a, kind) and a.question == question.question)

    def identity(self) -> Identity:
        """The engine's identity. Raises Starting with the engine's message if it has none."""
        probe = _UNLIKE_ANY
        learned: dict[str, str | int] = {}
        for _ in range(len(m.Namespace.__struct_fields__) + 1):
            answer = self._hello(probe)
            if isinstance(answer, m.Welcome):
                return Identity(answer.instance, learned, answer.ranks, hash_block_size=answer.hash_block_size)
            more = _learned(probe, answer.reason)
            if more is None:
                raise Starting(answer.reason)
            learned |= more
            probe = msgspec.structs.replace(probe, **more)
        raise Starting("its refusals do not end")

    def starting(self) -> bool:
        """Whether the engine is still starting: what it computes now is neither exported nor stored."""
        answer = self._hello(_UNLIKE_ANY)
        return isinstance(answer, m.LeaseRefused) and answer.reason == m.STILL_STARTING

    def _hello(self, namespace: m.Namespace) -> m.Welcome | m.LeaseRefused:
        hello = m.Hello(m.PROTOCOL, f"doctor/{os.urandom(4).hex()}", namespace)
        return self._ask(hello, lambda a: isinstance(a, m.Welcome | m.LeaseRefused))

    def _ask(self, message: msgspec.Struct, right):
        with contextlib.suppress(zmq.Again):  # it refused the handshake: the monitor has the event
            self._socket.send(m.encode(message), zmq.NOBLOCK)
        deadline = time.monotonic() + self._seconds
        events: list[int] = []
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(left * 1000))
            if self._monitor in ready:
                events.append(recv_monitor_message(self._monitor)["event"])
                if events[-1] in _FAILED or _refused(events):
                    raise self._no_answer(events)
            if self._socket in ready:
                try:
                    answer = m.decode_engine(self._socket.recv_multipart()[-1])
                except msgspec.DecodeError as error:
                    message = f"{self.address} sends messages that this vllm-kvtier cannot decode: {error}"
                    raise NoEndpoint("not ours", message) from error
                if right(answer):
                    return answer
                if isinstance(answer, m.LeaseRefused) and answer.code == "malformed":
                    message = f"{self.address} does not know this query: it runs an older vllm-kvtier"
                    raise NoEndpoint("other version", message)
                if isinstance(answer, m.LeaseRefused) and answer.lookup_id == getattr(message, "question", None):
                    raise NoEndpoint("busy", f"{self.address} is busy: {answer.reason}")
        raise self._no_answer(events)

    def _no_answer(self, events: list[int]) -> NoEndpoint:
        """The reason, found from the part of the ZMTP greeting that needs no key."""
        where = self.address
        try:
            mechanism = greeting(self._host, self._port, self._seconds)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                return NoEndpoint("closed", f"nothing listens on {where}")
            return NoEndpoint("closed", f"{where} cannot be reached: {error.strerror or error}")
        if mechanism not in ("NULL", "CURVE"):
            return NoEndpoint("not ours", f"{where} is not a connector's endpoint, or it hangs")
        if mechanism == "CURVE" and self._key is None:
            return NoEndpoint("key needed", f"{where} requires its cluster key, and none was given")
        if mechanism == "NULL" and self._key is not None:
            return NoEndpoint("no key there", f"{where} has no cluster key, and one was given")
        if _FAILED.intersection(events):
            return NoEndpoint("other key", f"{where} has another cluster key than the given one")
        return NoEndpoint("silent", f"{where} is connected and does not answer within {self._seconds:g} s")


def greeting(host: str, port: int, seconds: float) -> str:
    """The security mechanism of the listener: "NULL" or "CURVE"; "" if it does not speak ZMTP 3 (rfc.zeromq.org, number
    23). Raises OSError if no connection can be made."""
    with socket.create_connection((host, port), seconds) as sock:
        sock.settimeout(seconds)
        got = b""
        try:
            # Only signature and version: a peer with another mechanism would close before it has named its own.
            sock.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03")
            while len(got) < 32 and (more := sock.recv(64)):
                got += more
        except OSError:
            return ""
    if len(got) < 32 or got[0] != 0xFF or got[9] != 0x7F:
        return ""
    return got[12:32].rstrip(b"\0").decode("ascii", "replace")


def _refused(events: list[int]) -> bool:
    """Whether the connection was closed twice without being established: no process listens."""
    return zmq.EVENT_CONNECTED not in events and events.count(zmq.EVENT_CLOSED) >= 2


def _unlike(name: str) -> str | int:
    """A value of this field that no engine has."""
    hint = m.Namespace.__annotations__[name]
    return _NO_NAME if hint == m.Name or hint is str else _NO_NUMBER


_UNLIKE_ANY = m.Namespace(**{name: _unlike(name) for name in m.Namespace.__struct_fields__})


def field_label(name: str) -> str:
    """How a namespace's field is called in refusals."""
    other = msgspec.structs.replace(_UNLIKE_ANY, **{name: 0 if isinstance(_unlike(name), int) else "."})
    message = _UNLIKE_ANY.mismatch(other) or f"{name} differs"
    return message.partition(" differs")[0]


def _learned(probe: m.Namespace, reason: str) -> dict[str, str | int] | None:
    """What ``reason`` says of the one field that it names; None: it speaks of nothing such."""
    for name in probe.__struct_fields__:
        mine = getattr(probe, name)
        begin = f"{field_label(name)} differs: {mine or 'nothing'} here, "
        if reason.startswith(begin) and reason.endswith(" there"):
            text = reason[len(begin) : -len(" there")]
            text = "" if text == "nothing" else text
            if not isinstance(mine, int):
                return {name: text}
            return {name: int(text or 0)} if re.fullmatch("[0-9]{0,12}", text) else None
    return None
