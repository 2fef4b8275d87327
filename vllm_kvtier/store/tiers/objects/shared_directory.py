"""A directory that stores of several nodes share as an object store: it is kept below its size.

Any of the stores may evict, one at a time: every SCAN_SECONDS, or after it wrote WRITTEN_SHARE of the size, a store
takes a turn, lists the files, and removes those that were used longest ago. A file's time of modification is its last
use: readers set it. A reader of a removed file sees a miss. A turn is taken by renaming a new file over STAMP, whose
time of modification is when the next turn may begin. Nothing is to be given back: a killed store's turn ends by itself.
Two stores that scan at the same time do no harm.

All times are of the file server, so that clocks of nodes do not matter.
"""

import errno
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_kvtier.store.tiers.objects.object_names import ObjectLocation
from vllm_kvtier.store.tiers.request_pool import Trouble

SCAN_SECONDS = 30.0
WRITTEN_SHARE = 0.02  # of the size
KEPT_SHARE = 0.9  # of the size, after files were removed
TURN_SECONDS = 30.0  # until another store may scan if this one dies
SCAN_PAUSE_FACTOR = 10  # times the duration of a scan: until the next one of any store
MAX_PAUSE = 3600.0
TOUCH_SECONDS = 60.0  # precision of a file's last use
LEFT_SECONDS = 600.0  # age of a file that a killed store did not finish, and of a folder without blocks
STAMP = ".kvtier-scan"
# Paths in the directory, as of ObjectLocation.key: other files may be there that are named by a hash.
_BLOCK = re.compile(r"[0-9a-f]{32}/\d+/([0-9a-f]{2})/\1[0-9a-f]{30}")
_FOLDER = re.compile(r"[0-9a-f]{32}(?:/\d+(?:/[0-9a-f]{2})?)?")
_UNFINISHED = re.compile(rf"(?:{_BLOCK.pattern}|{re.escape(STAMP)}|\.kvtier)#[0-9a-z]+")  # obstore's, and ours


class SharedDirectory:
    """``size``: of all blocks, in bytes. Methods are for any thread; ``scan_if_due`` for one at a time."""

    def __init__(self, location: ObjectLocation, size: int, scan_seconds: float = SCAN_SECONDS):
        self._location, self._size, self._scan_seconds = location, size, scan_seconds
        self._root = Path(location.bucket)
        self._stamp = self._root / STAMP
        self._seen = 0.0  # STAMP's time when this store last looked
        self._scanned = time.monotonic()  # when any store last scanned, as far as this one knows
        self._written = 0  # bytes since then
        self._full = False  # the file system is
        self._server_time = time.time() - time.monotonic()  # time of the file server, at 0 of the monotonic clock

    def check(self) -> None:
        """Raises Trouble if the directory is gone, as after an unmount: a write would create it."""
        try:
            there = (self._root / self._location.marker).exists()
        except OSError as error:
            raise Trouble(f"{self._location}: {error.strerror}") from error
        if not there:
            raise Trouble(f"{self._location}: the file {self._location.marker} is gone; is the file system mounted?")

    def was_written(self, nbytes: int) -> None:
        self._written += nbytes

    def is_full(self) -> None:
        """A write found no space: remove some files even below the size."""
        self._full = True

    def was_used(self, key: str, modified: float) -> None:
        """``modified``: the file's time before."""
        if abs(self._server_time + time.monotonic() - modified) > TOUCH_SECONDS:
            path = self._root / key
            with suppress(OSError):  # read-only, or another user's
                os.utime(path)
                self._server_time = path.stat().st_mtime - time.monotonic()

    def scan_if_due(self) -> tuple[int, int] | None:
        """Remove files if it is time to, and another store does not. Returns (bytes in blocks, files removed); None: it
        did not scan."""
        with suppress(OSError):  # not there yet, or the file server fails
            turn = self._stamp.stat().st_mtime
            if turn != self._seen:  # another store has scanned, or does
                self._seen, self._scanned = turn, time.monotonic()
                self._written = 0
        late = time.monotonic() - self._scanned >= self._scan_seconds
        if not (late or self._full or self._written >= WRITTEN_SHARE * self._size) or not self._take_turn():
            return None
        began, self._written = time.monotonic(), 0
        full, self._full = self._full, False
        used = self._by_time()
        total = sum(used.values())
        limit = min(self._size, total) if full else self._size
        files, nbytes = self._remove(used, total - int(KEPT_SHARE * limit)) if total > limit or full else (0, 0)
        self._end_turn(SCAN_PAUSE_FACTOR * (time.monotonic() - began))
        self._scanned = time.monotonic()
        return total - nbytes, files

    def _take_turn(self) -> bool:
        new = f"{self._stamp}#{secrets.token_hex(8)}"
        try:
            os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            now = os.stat(new).st_mtime
            next_turn = self._stamp.stat().st_mtime if self._stamp.exists() else 0.0
            if now < next_turn <= now + self._pause() + 1.0:  # a later one is from before the clock was set back
                os.unlink(new)
                return False
            os.rename(new, self._stamp)
        except OSError as error:
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._end_turn(TURN_SECONDS)
        return True

    def _end_turn(self, pause: float) -> None:
        """The next turn begins in ``pause`` seconds. The file has its time for its time of change, and says the
        pause."""
        pause = min(pause, MAX_PAUSE)
        with suppress(OSError):  # the file system is full
            self._stamp.write_text(f"{pause:.3f}\n")
        with suppress(OSError):
            os.utime(self._stamp)
            turn = self._stamp.stat().st_mtime + pause
            os.utime(self._stamp, (turn, turn))
            self._seen = self._stamp.stat().st_mtime

    def _pause(self) -> float:
        """The pause that the last turn's store has written; ``MAX_PAUSE`` if it could not."""
        try:
            return min(float(self._stamp.read_text()), MAX_PAUSE)
        except (OSError, ValueError):
            return MAX_PAUSE

    def _by_time(self) -> Counter[int]:
        """Bytes of blocks by the second of their last use. Removes what killed stores left."""
        used = Counter[int]()
        try:
            now = self._stamp.stat().st_mtime - TURN_SECONDS
        except OSError:
            now = 0.0
        for path, name, found in self._files(now - LEFT_SECONDS):
            if _BLOCK.fullmatch(name):
                used[int(found.st_mtime)] += found.st_size
            elif _UNFINISHED.fullmatch(name) and found.st_mtime < now - LEFT_SECONDS:
                with suppress(OSError):
                    os.unlink(path)
        return used

    def _remove(self, used: Counter[int], excess: int) -> tuple[int, int]:
        """Remove at least ``excess`` bytes of the blocks that were used longest ago. Returns the files and bytes."""
        newest, older = 0, 0  # second up to which all are removed, bytes before it
        for newest in sorted(used):
            older += used[newest]
            if older >= excess:
                break
        left = excess - (older - used[newest])  # bytes to remove of the last second
        files = nbytes = 0
        for path, name, found in self._files():
            second = int(found.st_mtime)
            if not _BLOCK.fullmatch(name) or second > newest or (second == newest and left <= 0):
                continue
            with suppress(OSError):
                os.unlink(path)
                files, nbytes = files + 1, nbytes + found.st_size
                left -= found.st_size if second == newest else 0
        return files, nbytes

    def _files(self, unused_since: float = 0.0) -> Iterator[tuple[str, str, os.stat_result]]:
        """Path, path below the directory, and stat of all files; keeps the turn meanwhile. Removes folders that have
        been empty since ``unused_since``."""
        root = str(self._root)
        folders, kept = [root], time.monotonic()
        while folders:
            if time.monotonic() - kept > TURN_SECONDS / 6:
                self._end_turn(TURN_SECONDS)
                kept = time.monotonic()
            folder, empty = folders.pop(), True
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    empty = False
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        with suppress(OSError):
                            yield entry.path, entry.path[len(root) + 1 :], entry.stat(follow_symlinks=False)
            if empty and _FOLDER.fullmatch(folder[len(root) + 1 :]):
                with suppress(OSError):
                    if os.stat(folder).st_mtime < unused_since:
                        os.rmdir(folder)
