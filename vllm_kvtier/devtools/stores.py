"""A node store seen from outside: what it counts, when it is quiet, its processes. For demos, tests and benchmarks."""

import os
import select
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.lower.base import TierCounts
from vllm_kvtier.wire.stream import read_frame, write_frame

ANSWER_SECONDS = 10.0
QUIET_SECONDS = 0.06  # in which nothing moves between engines, memory and what lies below
POLL_SECONDS = 0.01  # the store tells nobody when something has ended: it has to be asked


class StoreFailed(RuntimeError):
    """The store does not say how it is, or not what is needed."""


def store_counts(path: str, seconds: float = ANSWER_SECONDS) -> m.Counts:
    """What the store at ``path`` counts. Blocks; raises StoreFailed, with its words if it refuses."""
    fds: list[int] = []
    deadline = time.monotonic() + seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(seconds)
            sock.connect(path)
            for message in (m.Hello("devtools", os.getpid(), "tool"), m.Stat(1)):
                write_frame(sock, m.encode(message))
            while True:
                reply = m.decode_reply(read_frame(sock, deadline, fds, m.MAX_FRAME))
                if isinstance(reply, m.Counts):
                    return reply
                if isinstance(reply, m.Refused):
                    raise StoreFailed(f"the store at {path} refused: {reply.reason}")
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise StoreFailed(f"no store says how it is at {path}: {str(error) or repr(error)}") from error
    finally:
        for fd in fds:
            os.close(fd)


def tier_of(counts: m.Counts, name: str = "disk") -> TierCounts:
    """Raises StoreFailed where the store has no such tier."""
    for tier in counts.tiers:
        if tier.name == name:
            return tier
    raise StoreFailed(f"the store has no tier {name!r}; there are {[tier.name for tier in counts.tiers]}")


def open_tier(path: str, name: str = "disk", seconds: float = 30.0) -> tuple[m.Counts, float]:
    """The store's counts as soon as that tier can be used, and the seconds that took. Raises StoreFailed if it cannot
    be, in its words, or not in time."""
    started = time.monotonic()
    while (tier := tier_of(counts := store_counts(path), name)).state == "opening":
        if time.monotonic() > started + seconds:
            raise StoreFailed(f"{name} is not open after {seconds:g} s")
        time.sleep(POLL_SECONDS)
    if tier.state != "ready":
        raise StoreFailed(f"{name} is {tier.state}: {tier.reason}")
    return counts, time.monotonic() - started


def settled(path: str, quiet: float = QUIET_SECONDS, seconds: float = 10.0) -> m.Counts:
    """The store's counts when for ``quiet`` seconds nothing has moved into it, up or down, and nothing waits to be
    written; after ``seconds`` whatever they are. Raises StoreFailed."""
    deadline = time.monotonic() + seconds
    last, since = None, 0.0
    while True:
        counts, now = store_counts(path), time.monotonic()
        index = counts.index
        moved = (index.commits, index.aborts, index.reservations, index.leases)
        moved += tuple((tier.read_blocks, tier.written_blocks) for tier in counts.tiers)
        if moved != last:
            last, since = moved, now
        busy = index.reservations or any(map(_to_be_written, counts.tiers))
        if (now - since > quiet and not busy) or now > deadline:
            return counts
        time.sleep(POLL_SECONDS)


def _to_be_written(tier: TierCounts) -> float:
    """Blocks that wait for this tier, or are on their way; none where it takes none."""
    of = tier.extra.get
    over = of("written", 0) + of("failed", 0) + of("dropped_evicted", 0)
    return of("admitted", 0) - over if tier.state == "ready" else 0


def end_store(path: str, how: signal.Signals = signal.SIGTERM, seconds: float = 30.0) -> None:
    """Send the store at ``path`` this signal, and wait until it is gone. Nothing to do where none answers: one that
    hangs ends by itself, for want of engines."""
    with suppress(StoreFailed, ProcessLookupError):  # there is none, or it has just ended
        end_process(store_counts(path).pid, how, seconds)


def end_process(pid: int, how: signal.Signals = signal.SIGKILL, seconds: float = 10.0) -> None:
    """Raises ProcessLookupError if there is no such process."""
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, how)
        select.select([fd], [], [], seconds)
    finally:
        os.close(fd)


def lives(pid: int) -> bool:
    """Whether it does anything: one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def mover_of(store: int, kind: str = "disk") -> int:
    """Process id of the store's mover of that kind; 0 if it has none at present."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it ended meanwhile
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"vllm_kvtier.store.lower.runner" not in words or f"--kind={kind}".encode() not in words:
                continue
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == store and lives(int(entry.name)):
                return int(entry.name)
    return 0
