"""Faults on purpose: what is to go wrong in an engine of a test, and what did. ``faulty_connector`` does it.

A plan is a small file that the engine reads whenever it could do something wrong, so that a running engine can be
told to misbehave and to stop; what a fault did is appended to a second file, so that a test can wait for it.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

VARIABLE = "KVTIER_FAULTS"  # names the plan file in the engine's environment


class FaultPlan(msgspec.Struct, forbid_unknown_fields=True):
    """What goes wrong from now on."""

    corrupt: str = ""  # "pages": one bit of ours after it was summed; "sums": our table; "arrival": what we read
    hold_before: bool = False  # reads are not even posted
    hold_after: bool = False  # reads are posted, and seem to run on
    fail_reads: bool = False  # reads end with an error
    stall_serving: bool = False  # no progress for peers that read from us
    drop: list[str] = []  # tags of messages (wire/messages.py) that are lost on their way out


class FaultFile:
    """The plan file and the record beside it; the same class writes (tests) and reads (engines)."""

    def __init__(self, path: str | os.PathLike):
        self._path, self._record = Path(path), Path(f"{path}.record")
        self._seen: tuple[int, int] | None = None
        self._plan = FaultPlan()

    def set(self, **plan: Any) -> None:
        """From now on this goes wrong, and nothing else. Atomic: a reader sees the old plan or the new one."""
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
        """How often a fault of this name did something."""
        return self._record.read_text().splitlines().count(what) if self._record.exists() else 0
