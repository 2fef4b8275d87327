"""What an engine's endpoint (of its connector, not vLLM's server) says to whoever asks.

Who it is in words an engine tells who asks (``Identify``). The namespace itself it only compares, and refuses a
greeting with the first difference. So that is learned a field at a time, by greeting with values that no engine has
until none differs; then the engine welcomes, and says how its cache lies. It costs the engine a message a field.
"""

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

_NO_NUMBER = 1 << 39  # of a namespace's counts
_NO_NAME = "?doctor?"
_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
}


class NoEndpoint(KVTierError):
    """``why``: closed | key needed | no key there | other key | not ours | other version | silent."""

    def __init__(self, why: str, words: str):
        super().__init__(words)
        self.why = why


class Starting(KVTierError):
    """It answers, but has no namespace to compare: it starts, or its workers cannot serve. Its own words."""


@dataclass(frozen=True)
class Identity:
    """``fields``: of the namespace, those that engines compare. ``ranks``: how each rank's cache lies. ``words``: of
    what all that was made, as the engine says; {} if it does not."""

    instance: str
    fields: dict[str, str | int]
    ranks: list[m.RankInfo]
    words: dict[str, str] = field(default_factory=dict)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block hash: what is shorter is never shared. 0 if not known."""
        return int(self.fields.get("hash_block_tokens", 0))


def parse_address(text: str) -> tuple[str, int]:
    """Raises KVTierError if it is not HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise KVTierError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


class EndpointProbe:
    """A connection. ``close`` it. Every question raises NoEndpoint where none is answered."""

    def __init__(self, address: str, key: ClusterKey | None = None, seconds: float = 3.0):
        """Raises KVTierError if ``address`` is none."""
        self.address = address
        self._host, self._port = parse_address(address)
        self._key, self._seconds = key, seconds
        self._ids = itertools.count(1)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE)
        self._socket.setsockopt(zmq.IPV6, ":" in self._host)
        if key is not None:
            key.secure_client(self._socket)
        self._monitor = self._socket.get_monitor_socket()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._socket.connect(f"tcp://{host}:{self._port}")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def __enter__(self) -> "EndpointProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inspection(self) -> m.Inspection:
        question = m.Inspect(next(self._ids))
        return self._ask(question, lambda a: isinstance(a, m.Inspection) and a.question == question.question)

    def holding(self, tokens: list[int], salt: str) -> m.Holding:
        question = m.Query(next(self._ids), tokens, salt)
        return self._ask(question, lambda a: isinstance(a, m.Holding) and a.question == question.question)

    def explanation(self, tokens: list[int], salt: str, adapter: str = "") -> m.Explanation:
        question = m.Explain(next(self._ids), tokens, salt, adapter)
        return self._ask(question, lambda a: isinstance(a, m.Explanation) and a.question == question.question)

    def words(self) -> dict[str, str]:
        """See ``Identity.words``."""
        question = m.Identify(next(self._ids))
        right = self._ask(question, lambda a: isinstance(a, m.Identified) and a.question == question.question)
        return dict(right.parts)

    def identity(self) -> Identity:
        """Who it is. Raises Starting with the engine's words if it has nothing to tell yet, or will never have."""
        probe = m.Namespace(**{name: _unlike(name) for name in m.Namespace.__struct_fields__})
        learned: dict[str, str | int] = {}
        for _ in range(len(m.Namespace.__struct_fields__) + 1):
            hello = m.Hello(m.PROTOCOL, f"doctor/{os.urandom(4).hex()}", probe)
            answer = self._ask(hello, lambda a: isinstance(a, m.Welcome | m.Refused))
            if isinstance(answer, m.Welcome):
                return Identity(answer.instance, learned, answer.ranks)
            more = _learned(probe, answer.reason)
            if more is None:
                raise Starting(answer.reason)
            learned |= more
            probe = msgspec.structs.replace(probe, **more)
        raise Starting("its refusals do not end")

    def _ask(self, message: msgspec.Struct, right):
        self._socket.send(m.encode(message))
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
                    raise NoEndpoint(
                        "not ours", f"{self.address} sends what this vllm-kvtier does not understand: {error}"
                    ) from error
                if right(answer):
                    return answer
                if isinstance(answer, m.Refused) and answer.code == "malformed":
                    raise NoEndpoint(
                        "other version",
                        f"{self.address} does not understand what is asked: it runs an older vllm-kvtier",
                    )
        raise self._no_answer(events)

    def _no_answer(self, events: list[int]) -> NoEndpoint:
        """Why: by what it says of itself before any key is needed."""
        where = self.address
        try:
            mechanism = greeting(self._host, self._port, self._seconds)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                return NoEndpoint("closed", f"nothing listens on {where}")
            return NoEndpoint("closed", f"{where} cannot be reached: {error.strerror or error}")
        if mechanism not in ("NULL", "CURVE"):
            return NoEndpoint("not ours", f"what listens on {where} is no connector's endpoint, or it hangs")
        if mechanism == "CURVE" and self._key is None:
            return NoEndpoint("key needed", f"{where} talks only to holders of its cluster key, and none was given")
        if mechanism == "NULL" and self._key is not None:
            return NoEndpoint("no key there", f"{where} has no cluster key, and one was given here")
        if _FAILED.intersection(events):
            return NoEndpoint("other key", f"{where} has another cluster key than the one given here")
        return NoEndpoint("silent", f"{where} is connected and does not answer within {self._seconds:g} s")


def greeting(host: str, port: int, seconds: float) -> str:
    """How who listens there wants to be spoken to: "NULL" or "CURVE"; "" if it does not speak ZMTP 3 (rfc.zeromq.org,
    number 23). Raises OSError where no connection can be made."""
    with socket.create_connection((host, port), seconds) as sock:
        sock.settimeout(seconds)
        got = b""
        try:
            # A signature and a version: no more, or who wants another mechanism hangs up before it has named it.
            sock.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03")
            while len(got) < 32 and (more := sock.recv(64)):
                got += more
        except OSError:
            return ""
    if len(got) < 32 or got[0] != 0xFF or got[9] != 0x7F:
        return ""
    return got[12:32].rstrip(b"\0").decode("ascii", "replace")


def _refused(events: list[int]) -> bool:
    """Twice closed without having been connected: nobody listens."""
    return zmq.EVENT_CONNECTED not in events and events.count(zmq.EVENT_CLOSED) >= 2


def _unlike(name: str) -> str | int:
    """A value of this field that no engine has."""
    hint = m.Namespace.__annotations__[name]
    return _NO_NAME if hint == m.Name or hint is str else _NO_NUMBER


def field_words(name: str) -> str:
    """How a namespace's field is called in refusals."""
    same = {each: _unlike(each) for each in m.Namespace.__struct_fields__}
    other = {**same, name: 0 if isinstance(same[name], int) else "."}
    sentence = m.Namespace(**same).mismatch(m.Namespace(**other)) or f"{name} differs"
    return sentence.partition(" differs")[0]


def _learned(probe: m.Namespace, reason: str) -> dict[str, str | int] | None:
    """What ``reason`` says of the one field that it names; None: it speaks of nothing such."""
    for name in probe.__struct_fields__:
        mine = getattr(probe, name)
        begin = f"{field_words(name)} differs: {mine or 'nothing'} here, "
        if reason.startswith(begin) and reason.endswith(" there"):
            text = reason[len(begin) : -len(" there")]
            text = "" if text == "nothing" else text
            if not isinstance(mine, int):
                return {name: text}
            return {name: int(text or 0)} if re.fullmatch("[0-9]{0,12}", text) else None
    return None
