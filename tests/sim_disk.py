"""A disk in memory with a page cache, which can crash and fail at any operation.

Writes go to the cache, syncs to the disk. A crash keeps a random part of unsynced data: nothing, all, a beginning,
single sectors in any order, half a sector. The same holds for names in the folder.
"""

import errno
import os
import random
from dataclasses import dataclass, field

from vllm_kvtier.store.tiers.disk.file_ops import Files

SECTOR = 512


class Crash(BaseException):
    """Not an Exception: nothing may catch it."""


@dataclass(eq=False)
class Node:
    disk: bytearray = field(default_factory=bytearray)
    cache: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)  # written since the last sync

    def after_crash(self, rng: random.Random) -> bytearray:
        how = rng.choice(("all", "none", "prefix", "sectors", "sectors", "torn"))
        if how == "all":
            return bytearray(self.cache)
        data = bytearray(self.disk)
        size = rng.choice((len(self.disk), len(self.cache)))
        _resize(data, size)
        writes = self.pending if how != "none" else []
        if how in ("prefix", "torn"):
            writes = writes[: rng.randint(0, len(writes))]
        for number, (offset, new) in enumerate(writes):
            last = number == len(writes) - 1
            if how == "torn" and last:
                new = new[: rng.randint(0, len(new))]
            pieces = [(offset, new)]
            if how == "sectors":
                likely = rng.random()
                bounds = [0, *range(SECTOR - offset % SECTOR, len(new), SECTOR), len(new)]
                spans = zip(bounds, bounds[1:], strict=False)
                pieces = [(offset + a, new[a:b]) for a, b in spans if b > a and rng.random() < likely]
            for at, piece in pieces:
                piece = piece[: max(0, size - at)]
                data[at : at + len(piece)] = piece
        return data


class SimDisk(Files):
    """``crash_at``: number of the operation at which it crashes. ``fail``: {number: errno or "short"}; a full disk
    stays full. ``lies``: a sync does nothing, and says that it did."""

    def __init__(self, seed: int = 0):
        self.rng = random.Random(seed)
        self.names_on_disk: dict[str, Node] = {}
        self.names_now: dict[str, Node] = {}
        self.pending_names: list[tuple[str, str, Node | None]] = []
        self.fds: dict[int, Node] = {}
        self.operations, self.crash_at, self.fail = 0, 0, {}
        self.full, self.faults, self.lies = False, 0, False

    def reboot(self, power_loss: bool) -> None:
        """What is found after a crash; without ``power_loss`` only the process died."""
        if power_loss:
            for name, link, node in self._surviving_names():
                _rename(self.names_on_disk, name, link, node)
            self.names_now = dict(self.names_on_disk)
            for node in dict.fromkeys(self.names_now.values()):
                node.disk = node.after_crash(self.rng)
                node.cache, node.pending = bytearray(node.disk), []
            self.pending_names = []
        self.fds.clear()
        self.operations, self.crash_at, self.fail, self.full = 0, 0, {}, False

    def _surviving_names(self):
        how = self.rng.choice(("all", "prefix", "any"))
        if how == "any":
            return [change for change in self.pending_names if self.rng.random() < 0.5]
        return self.pending_names[: self.rng.randint(0, len(self.pending_names)) if how == "prefix" else None]

    def _tick(self, grows: bool = False) -> str:
        """An operation: may crash or fail. "short": it is to do less than it is asked."""
        self.operations += 1
        if self.operations == self.crash_at:
            raise Crash
        fault = self.fail.get(self.operations, "")
        self.faults += bool(fault)
        self.full |= fault == errno.ENOSPC
        if self.full and grows:
            self.faults += 1
            fault = errno.ENOSPC
        if isinstance(fault, int) and (fault != errno.ENOSPC or grows):
            raise OSError(fault, os.strerror(fault))
        return fault if isinstance(fault, str) else ""

    # -- Files --------------------------------------------------------------------------------------------------

    def make_folder(self, path):
        return False

    def refusal(self, folder):
        return ""

    def names(self, folder):
        return list(self.names_now)

    def open(self, path, flags):
        self._tick()
        name = os.path.basename(path)
        if name not in self.names_now:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._change(name, "", Node())
        node = self.names_now[name]
        if flags & os.O_TRUNC:
            node.cache = bytearray()
            node.pending.clear()
        fd = max(self.fds, default=2) + 1
        self.fds[fd] = node
        return fd

    def close(self, fd):
        self.fds.pop(fd)

    def lock(self, fd):
        return True

    def is_at(self, path, fd):
        return True

    def size(self, fd):
        return len(self.fds[fd].cache)

    def left_to_others(self, folder):
        return 0

    def room(self, fd, folder, left):
        return 0, 1 << 40

    def truncate(self, fd, nbytes):
        self._tick()
        node = self.fds[fd]
        if nbytes < len(node.cache):
            node.pending.append((nbytes, bytes(len(node.cache) - nbytes)))
        _resize(node.cache, nbytes)

    def allocate(self, fd, offset, nbytes):
        cache = self.fds[fd].cache
        # A file that was made longer is sparse: it may find no room although it ends later.
        self._tick(grows=offset + nbytes > len(cache) or len(cache) > self.rng.randint(0, 1 << 17))
        _resize(cache, max(len(cache), offset + nbytes))

    def pread(self, fd, into, offset):
        short = self._tick()
        data = self.fds[fd].cache[offset : offset + len(into)]
        if short and len(data) > 1:
            data = data[: self.rng.randint(1, len(data) - 1)]
        into[: len(data)] = data
        return len(data)

    def pwrite(self, fd, data, offset):
        node = self.fds[fd]
        try:
            short = self._tick(grows=offset + len(data) > len(node.cache))
        except Crash:
            self._write(node, bytes(data), offset)
            raise
        data = bytes(data)
        if short and len(data) > 1:
            data = data[: self.rng.randint(1, len(data) - 1)]
        self._write(node, data, offset)
        return len(data)

    def _write(self, node, data, offset):
        if offset > len(node.cache):
            _resize(node.cache, offset)
        node.cache[offset : offset + len(data)] = data
        node.pending.append((offset, data))

    def sync(self, fd):
        node = self.fds[fd]
        try:
            self._tick()
        except OSError:
            # The kernel drops what it could not write and calls it clean: the next sync does not write it either.
            node.disk, node.pending = node.after_crash(self.rng), []
            raise
        if not self.lies:
            node.disk, node.pending = bytearray(node.cache), []

    def rename(self, old, new):
        self._tick()
        old = os.path.basename(old)
        self._change(os.path.basename(new), old, self.names_now[old])

    def unlink(self, path):
        self._tick()
        self._change(os.path.basename(path), "", None)

    def sync_folder(self, path):
        self._tick()
        if not self.lies:
            self.names_on_disk, self.pending_names = dict(self.names_now), []

    def _change(self, name, old, node):
        """``name`` is this node's; ``old``, if any, is no name any more. None: ``name`` is none."""
        self.pending_names.append((name, old, node))
        _rename(self.names_now, name, old, node)


def _rename(names, name, old, node):
    names.pop(old, None)
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))
