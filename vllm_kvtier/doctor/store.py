"""The node store: its socket, itself, and its tiers."""

import os
import pwd
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from vllm_kvtier import __version__
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.launcher import last_error, log_path, serves
from vllm_kvtier.store.memory.memory_limits import format_bytes
from vllm_kvtier.store.tiers.base import TierCounts
from vllm_kvtier.wire.stream import read_frame, write_frame

_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_START = "`kvtier store` starts one, and so does the first engine without `store: off`"


def store(
    path: str, expected: bool, seconds: float = 3.0, others: Sequence[str] = ()
) -> tuple[list[Check], m.Counts | None]:
    """Check the store; return its counts too, for the checks of prompts. ``expected``: it must be running. ``others``:
    where a second one may be, of processes with another environment."""
    wrong = socket_file(path, expected, others)
    if wrong is not None:
        return [wrong], None
    try:
        counts = request_counts(path, seconds=seconds)
    except KVTierError as error:
        fix = f"stop it (its pid is in {path}.lock); the next engine starts another"
        return [fail("node store", str(error), fix)], None
    return [*_whole(path, counts), *map(_second, filter(serves, others)), *_tiers(counts.tiers)], counts


def _second(path: str) -> Check:
    message = f"this user has a second one, at {path}: engines whose environments differ in XDG_RUNTIME_DIR share no KV"
    return warn("node store", message, "end one of them; an engine looks in both places before it starts one")


def socket_file(path: str, expected: bool = True, others: Sequence[str] = ()) -> Check | None:
    """Why no engine can connect there; None if engines can. ``others``: where there is none either."""
    name = "node store"
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        message = f"no store listens at {' or '.join([path, *others])}{_why_none(path)}"
        return fail(name, message, _START) if expected else unknown(name, f"{message}; {_START}")
    except OSError as error:
        fix = "give --socket; check the owner of its directory"
        return fail(name, f"{path} cannot be read: {error.strerror}", fix)
    if not stat.S_ISSOCK(found.st_mode):
        return fail(name, f"{path} exists and is not a socket", "remove it, or choose another path")
    if found.st_uid not in (os.getuid(), 0):
        users = f"belongs to user {_user(found.st_uid)}, not to {_user(os.getuid())}"
        message = f"the store at {path} {users}: it refuses other users' engines"
        return fail(name, message, "run engines and store as one user, or a store for each user")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            message = f"the socket at {path} is stale: a killed store left it, and no process listens{_why_none(path)}"
            return fail(name, message, f"no action needed; {_START} in its place")
        except PermissionError:
            return fail(name, f"this user may not connect to {path}", "run doctor as the engines' user")
        except OSError as error:
            return fail(name, f"{path} cannot be connected to: {error}", "see the store's log beside its socket")
    return None


def _why_none(path: str) -> str:
    error = last_error(path)
    return f" (the last one's log, {log_path(path)}, ends with: {error})" if error else ""


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def request_counts(path: str, client: str = "doctor", seconds: float = 3.0) -> m.Counts:
    """The counts of the store at ``path``. Raises as ``request``."""
    return request(path, m.Stat(1), m.Counts, client, seconds)


def request(path: str, message: msgspec.Struct, answer: type[_Answer], client: str, seconds: float) -> _Answer:
    """Send a message to the store at ``path`` on a new connection, and return its answer. ``client``: this process's
    name there. Raises KVTierError with the store's refusal, or why it does not answer."""
    fds: list[int] = []
    deadline = time.monotonic() + seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(seconds)
            sock.connect(path)
            for sent in (m.Hello(client, os.getpid(), "tool"), message):
                try:
                    write_frame(sock, m.encode(sent))
                except BrokenPipeError:  # it has refused; its message is still to be read
                    break
            while True:
                reply = m.decode_reply(read_frame(sock, deadline, fds, m.MAX_FRAME))
                if isinstance(reply, answer):
                    return reply
                if isinstance(reply, m.Refused):
                    raise KVTierError(f"the store at {path} refuses: {reply.reason}")
    except TimeoutError as error:
        raise KVTierError(f"the store at {path} hangs: it does not answer within {seconds:g} s") from error
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise KVTierError(f"no node store listens at {path}{_why_none(path)}; `kvtier store` starts one") from error
    except (OSError, EOFError, msgspec.DecodeError) as error:
        reason = str(error) or type(error).__name__
        raise KVTierError(f"the store at {path} closed the connection: {reason}; is it of another version?") from error
    finally:
        for fd in fds:
            os.close(fd)


def _whole(path: str, counts: m.Counts) -> Iterator[Check]:
    name, index = "node store", counts.index
    if counts.version != __version__:
        fix = f"stop it (pid {counts.pid}); the next engine starts one of its own version"
        yield warn(name, f"it runs vllm-kvtier {counts.version}, this is {__version__}", fix)
    if counts.note:
        yield warn(name, counts.note, "a smaller store_size, or more memory for the container")
    if index.discards:
        message = f"{index.discards} of its blocks had a wrong checksum when loaded; engines computed them"
        yield warn(name, message, "if the number grows, test this machine's memory and disk")
    if index.refused_room > max(100, index.reserved_slots // 10):
        message = f"it is too small: {index.refused_room} blocks were refused because all of it was in use, pinned or "
        yield warn(name, message + "being written", "a larger store_size, or unpin something")
    engines = sum(client.kind == "engine" for client in counts.clients)
    used = f"{format_bytes(index.used_pages * m.PAGE)} of {format_bytes(counts.pool_bytes)} used"
    if counts.ready_bytes != counts.pool_bytes:
        used += f", {format_bytes(counts.ready_bytes)} usable so far"
    if index.prefix_queries:
        used += f", {index.prefix_hits / index.prefix_queries:.0%} of what engines asked for found"
    yield ok(name, f"at {path} (pid {counts.pid}): {used}, {engines} engine{'s' * (engines != 1)}")


def _tiers(tiers: Sequence[TierCounts]) -> Iterator[Check]:
    for tier in tiers:
        yield _tier(tier)
        for address, error in tier.nodes.items():
            name = f"node {address}"
            if error is None:
                yield unknown(name, "it has not been tried yet")
            elif error:
                fix = "start its store, with node_listen at this address and the same cluster_key_file; it is retried"
                yield warn(name, error, fix)
            else:
                yield ok(name, "its store answers")


def _tier(tier: TierCounts) -> Check:
    name = f"tier {tier.name}"
    if tier.state == "unavailable":
        return fail(name, f"it is unavailable: {tier.reason}", "fix the cause; the store retries it by itself")
    if tier.state == "read_only":
        return warn(name, f"it is read-only: {tier.reason}", "fix the cause, and restart the store")
    if tier.state != "ready":
        return unknown(name, "it is being opened")
    if tier.read_failures + tier.write_failures + tier.timeouts:
        message = f"{tier.read_failures} reads and {tier.write_failures} writes failed, {tier.timeouts} timed out"
        return warn(name, message, "see dmesg, the network, and the store's log beside its socket")
    of = f" of {format_bytes(tier.capacity_bytes)}" if tier.capacity_bytes else ""
    return ok(name, f"ready, {format_bytes(tier.used_bytes)}{of} used")
