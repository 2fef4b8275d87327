"""Faults that a test injects into a running engine; ``faulty_connector`` carries them out, and ``altering_connector``
those of ALTER. Both import vLLM, which takes a test's process ten seconds; this module does not.

The plan is a small file that the engine reads before each operation that can fail, so that a running engine can be
made faulty and healthy again. Each fault that took effect is appended to a second file, for tests to wait for.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

VARIABLE = "KVTIER_FAULTS"  # names the plan file in the engine's environment
ALTER = "KVTIER_ALTER"  # names the file of ``altering_connector``


class FaultPlan(msgspec.Struct, forbid_unknown_fields=True):
    """The faults in force."""

    # What gets one flipped bit: our "pages" (after their checksums), our "checksums", or what arrives ("arrival").
    corrupt: str = ""
    hold_before: bool = False  # reads are not posted
    hold_after: bool = False  # reads are posted, and reported as running
    fail_reads: bool = False  # reads end with an error
    stall_serving: bool = False  # no progress for peers that read from us
    hold_behind: int = 0  # steps wait that compute a prompt behind so many of its tokens; 0: none
    short_loads: bool = False  # every load is short enough for a step to wait for it among others
    drop: list[str] = []  # tags of messages (wire/messages.py) that are not sent


class FaultFile:
    """The plan file and the record beside it. Tests write the plan and read the record; engines do the reverse."""

    def __init__(self, path: str | os.PathLike):
        self._path, self._record = Path(path), Path(f"{path}.record")
        self._seen: tuple[int, int] | None = None
        self._plan = FaultPlan()

    def set(self, **plan: Any) -> None:
        """Replace the plan. Atomic: a reader sees the old plan or the new one."""
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(FaultPlan(**plan)))
        part.replace(self._path)

    def plan(self) -> FaultPlan:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return FaultPlan()
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp != self._seen:
            self._plan = msgspec.json.decode(self._path.read_bytes(), type=FaultPlan)
            self._seen = stamp
        return self._plan

    def record(self, what: str) -> None:
        with self._record.open("a") as file:
            file.write(what + "\n")

    def happened(self, what: str) -> int:
        """How often a fault of this name took effect."""
        return self._record.read_text().splitlines().count(what) if self._record.exists() else 0


@contextmanager
def altered(file: Path, plan: str) -> Iterator[None]:
    """The engine that ``file`` is for alters what it loads, as ``plan`` says."""
    file.write_text(plan)
    try:
        yield
    finally:
        file.write_text("")
