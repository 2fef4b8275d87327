"""The node store: its socket, itself, and its tiers."""

import os
import pwd
import socket
import stat
import time

import msgspec

from vllm_kvtier import __version__
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.limits import in_words
from vllm_kvtier.wire.stream import read_frame, write_frame

_START = "`kvtier store` starts one, and so does the first engine without `store: off`"


def store(path: str, expected: bool, seconds: float = 3.0) -> tuple[list[Check], m.Counts | None]:
    """``expected``: somebody says that one runs there. What it counts comes too, for the checks of prompts."""
    wrong = socket_file(path, expected)
    if wrong is not None:
        return [wrong], None
    try:
        counts = ask(path, seconds)
    except KVTierError as error:
        return [
            fail("node store", str(error), f"end it (its pid is in {path}.lock), the next engine starts another")
        ], None
    return [*_whole(path, counts), *(check for tier in counts.tiers for check in _tier(tier))], counts


def socket_file(path: str, expected: bool = True) -> Check | None:
    """Why nobody can connect there; None if somebody may."""
    name = "node store"
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        sentence = f"no store listens at {path}"
        return fail(name, sentence, _START) if expected else unknown(name, f"{sentence}; {_START}")
    except OSError as error:
        return fail(
            name, f"{path} cannot be looked at: {error.strerror}", "give --socket; look at its directory's owner"
        )
    if not stat.S_ISSOCK(found.st_mode):
        return fail(name, f"{path} is there and is no socket", "remove it, or choose another path")
    if found.st_uid not in (os.getuid(), 0):
        return fail(
            name,
            f"the store at {path} belongs to user {_user(found.st_uid)}, not to this one ({_user(os.getuid())}): it "
            "refuses other users' engines",
            "run engines and store as one user, or give each user's engines a store of their own",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return fail(
                name,
                f"the socket at {path} is stale: a store that was killed left it, and nobody listens",
                f"nothing to clean up: {_START} in its place",
            )
        except PermissionError:
            return fail(name, f"this user may not connect to {path}", "run doctor as the engines' user")
        except OSError as error:
            return fail(name, f"{path} cannot be connected to: {error}", "see the store's log beside its socket")
    return None


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def ask(path: str, seconds: float = 3.0) -> m.Counts:
    """What the store at ``path`` counts. Raises KVTierError with its refusal, or with why there is no answer."""
    fds: list[int] = []
    deadline = time.monotonic() + seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(seconds)
            sock.connect(path)
            for message in (m.Hello("doctor", os.getpid(), "tool"), m.Stat(1)):
                try:
                    write_frame(sock, m.encode(message))
                except BrokenPipeError:  # it has refused already, and what it said is still to be read
                    break
            while True:
                reply = m.decode_reply(read_frame(sock, deadline, fds, m.MAX_FRAME))
                if isinstance(reply, m.Counts):
                    return reply
                if isinstance(reply, m.Refused):
                    raise KVTierError(f"the store at {path} refuses: {reply.reason}")
    except TimeoutError as error:
        raise KVTierError(f"the store at {path} hangs: it does not answer within {seconds:g} s") from error
    except (OSError, EOFError, msgspec.DecodeError) as error:
        words = str(error) or type(error).__name__
        raise KVTierError(f"the store at {path} breaks off: {words}; is it of another version?") from error
    finally:
        for fd in fds:
            os.close(fd)


def _whole(path: str, counts: m.Counts) -> list[Check]:
    name, index, checks = "node store", counts.index, []
    if counts.version != __version__:
        checks.append(
            warn(
                name,
                f"it runs vllm-kvtier {counts.version}, this is {__version__}",
                f"end it (pid {counts.pid}); the next engine starts one of its own version",
            )
        )
    if counts.note:
        checks.append(warn(name, counts.note, "a smaller store_size, or more memory for the container"))
    if index.discards:
        checks.append(
            warn(
                name,
                f"{index.discards} of its blocks failed their checksum when loaded (and were computed instead)",
                "if the number grows, test this machine's memory and disk",
            )
        )
    if index.refused_room > max(100, index.reserved_slots // 10):
        checks.append(
            warn(
                name,
                f"it is too small: {index.refused_room} blocks found no room, because everything in it was in use, "
                "pinned or being written",
                "a larger store_size, or unpin something",
            )
        )
    engines = sum(client.kind == "engine" for client in counts.clients)
    held = f"{in_words(index.used_pages * m.PAGE)} of {in_words(counts.pool_bytes)} used"
    growing = "" if counts.ready_bytes == counts.pool_bytes else f", {in_words(counts.ready_bytes)} usable so far"
    share = (
        f", {index.found_units / index.looked_up_units:.0%} of what was asked for found"
        if index.looked_up_units
        else ""
    )
    checks.append(
        ok(name, f"at {path} (pid {counts.pid}): {held}{growing}{share}, {engines} engine{'s' * (engines != 1)}")
    )
    return checks


def _tier(tier) -> list[Check]:
    name = f"tier {tier.name}"
    if tier.state == "set aside":
        return [fail(name, f"it is set aside: {tier.reason}", "it is tried again by itself once that is put right")]
    if tier.state == "read only":
        return [
            warn(name, f"nothing is written to it any more: {tier.reason}", "put that right, and restart the store")
        ]
    if tier.state != "ready":
        return [unknown(name, "it is being opened")]
    failures = tier.read_failures + tier.write_failures + tier.timeouts
    if failures:
        words = f"{tier.read_failures} reads and {tier.write_failures} writes failed, {tier.timeouts} took too long"
        return [warn(name, words, "look at dmesg, at the network, and at the store's log beside its socket")]
    of = f" of {in_words(tier.capacity_bytes)}" if tier.capacity_bytes else ""
    return [ok(name, f"ready, {in_words(tier.used_bytes)}{of} used")]
