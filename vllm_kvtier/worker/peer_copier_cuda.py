"""Copies from other GPUs' caches, mapped here: one kernel on a stream of its own reads, checks and stores.

See ``peer_copier.PeerCopier`` for what is promised. The kernel reads over NVLink or PCIe whatever it is told, so what
it is told is checked here: nothing outside of what the source shares is ever touched. A kernel that was launched ends
by itself, also when the source's process dies: a mapping keeps its memory.
"""

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.kernels import peer, peer_plan
from vllm_kvtier.logs import get_logger
from vllm_kvtier.worker import copier_sheets
from vllm_kvtier.worker.cover import Part, PartGroup, PartRegion
from vllm_kvtier.worker.cuda import Driver
from vllm_kvtier.worker.cuda_ipc import Mapped, Mappings
from vllm_kvtier.worker.peer_copier import CopyJob
from vllm_kvtier.worker.peer_tables import Batch, GroupTable, most_words, pack, padded, room
from vllm_kvtier.worker.views import CacheView

logger = get_logger("vllm.kvtier.fetches")

# Rows of one launch at most; the scratch on the device is made for so many (2 MiB).
MAX_ROWS = 16384
# Between two looks at an event, where somebody waits at most so long: the driver only waits without an end.
_LOOK_EVERY = 50e-6


class _Sheet:
    """Pinned host memory for the work of one call and its verdicts."""

    def __init__(self, words: int, rows: int):
        self.words_capacity, self.rows_capacity = words, rows
        self._memory = copier_sheets.pinned(words * 8 + rows)
        self.address = self._memory.data_ptr()
        flat = self._memory.numpy()
        self.words = flat[: words * 8].view(np.int64)
        self.verdicts = flat[words * 8 :]


class _Source:
    def __init__(self, mapped: list[Mapped], tables: dict[int, list[GroupTable]]):
        self.mapped, self.tables = mapped, tables  # tables: by group, one for each rank that is read
        self.users = 0  # copies under way
        self.leaving = False


class CudaPeerCopy:
    """See ``peer_copier.Copy``."""

    def __init__(self, copier: "CudaPeerCopier", jobs: Sequence[CopyJob], sources: list[_Source]):
        self.nbytes = 0
        self._copier, self._sources = copier, sources
        self._bad: list[set[int]] = [set() for _ in jobs]
        self._event: int | None = None
        self._sheet: _Sheet | None = None
        self._places: list[tuple[int, np.ndarray, int]] = []  # job, our blocks, first verdict

    def begun(self, event: int, sheet: _Sheet, places: list[tuple[int, np.ndarray, int]]) -> None:
        self._event, self._sheet, self._places = event, sheet, places

    def done(self) -> bool:
        if self._event is None:
            return True
        if not self._copier.driver.reached(self._event):
            return False
        for job, blocks, first in self._places:
            wrong = self._sheet.verdicts[first : first + len(blocks)] != peer.GOOD
            self._bad[job].update(blocks[wrong].tolist())
        event, sheet = self._event, self._sheet
        self._event = self._sheet = None
        self._copier.ended(self, event, sheet, self._sources)
        return True

    def bad(self, job: int) -> set[int]:
        return self._bad[job]

    def why(self, job: int) -> str:
        return ""

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        if self._event is not None:
            self._copier.driver.wait(stream.cuda_stream, self._event)

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_EVERY)
        return True

    def refuse(self, job: int, blocks: np.ndarray) -> None:
        self._bad[job].update(blocks.tolist())


class CudaPeerCopier:
    """See ``peer_copier.PeerCopier``."""

    def __init__(
        self,
        view: CacheView,
        table: torch.Tensor,
        shape: peer_plan.Shape = peer_plan.SHAPE,
        checked: bool = True,
        driver: Driver | None = None,
        mappings: Mappings | None = None,
        max_rows: int = MAX_ROWS,
    ):
        """``table``: int64 [num_blocks], our checksums, on the view's device. ``checked``: False leaves checksums and
        verdicts out, for measurements: all blocks are then reported bad. ``driver``, ``mappings``: in place of the
        device's own. ``max_rows``: of a launch, a multiple of ``peer_plan.PAD``.

        Raises RuntimeError without Triton or a driver.
        """
        if max_rows % peer_plan.PAD:
            raise ValueError(f"launches of {max_rows} rows: they come in multiples of {peer_plan.PAD}")
        self._view, self._table, self._shape = view, table, shape
        self._device = view.device
        if self._device.index is None:
            self._device = torch.device(self._device.type, torch.cuda.current_device())
        self.driver = driver or Driver(self._device.index)
        self._mappings = mappings or Mappings(self.driver)
        self._max_rows = max_rows
        self.driver.enter()
        with torch.cuda.device(self._device):
            # Before the model's kernels (0), as loads: a few SMs for a moment, which would otherwise wait behind each
            # kernel of a prefill.
            self._stream = torch.cuda.Stream(self._device, priority=-2)
            # Allocated for that stream: memory that the model's gave back may still be written by it.
            with torch.cuda.stream(self._stream):
                scratch = (
                    torch.empty(room(max_rows, shape), dtype=torch.int64, device=self._device),
                    torch.empty(max_rows, dtype=torch.int64, device=self._device),
                )
        self._mover = peer.PeerMover(scratch, shape, checked, self.driver.launcher)
        self._sources: dict[str, _Source] = {}
        self._leaving: list[_Source] = []
        self._under_way: list[CudaPeerCopy] = []
        self._events: list[int] = []
        self._sheets: list[_Sheet] = []
        self._compiled: set[tuple] = set()
        self._closed = False

    def warm_up(self) -> None:
        """Compiles what copies from an engine like this one need (seconds)."""
        whole = {
            g.group: PartGroup(g.group, tuple(PartRegion(r, r, 0, r.outer, 0) for r in g.regions), True)
            for g in self._view.groups
        }
        self.driver.enter()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._compile([self._group_table(g, self._view.num_blocks, 0, _as_it_is) for g in whole.values()])

    def add(self, source: str, parts: Sequence[Part]) -> None:
        if source in self._sources:
            return
        self.driver.enter()
        mapped: list[Mapped] = []
        tables: dict[int, list[GroupTable]] = defaultdict(list)
        try:
            # What is put on the device goes behind nothing of the model's.
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for part in parts:
                    info = part.source
                    mapped.append(self._mappings.open(info.shared))
                    for group in part.groups:
                        tables[group.group].append(
                            self._group_table(group, info.num_blocks, info.sums_base, mapped[-1].translate)
                        )
                self._compile([table for each in tables.values() for table in each])
        except Exception as error:
            self._close(mapped)
            if isinstance(error, ValueError):  # pages that do not lie at multiples of 4 bytes
                raise KVTierError(f"the pages of {source} cannot be copied: {error}") from error
            raise
        self._sources[source] = _Source(mapped, dict(tables))

    def forget(self, source: str) -> None:
        found = self._sources.pop(source, None)
        if found is None:
            return
        found.leaving = True
        self._leaving.append(found)
        self.driver.enter()
        self._reap()
        self._unmap()

    def start(self, jobs: Sequence[CopyJob], after: torch.cuda.Event | None = None) -> CudaPeerCopy:
        self.driver.enter()
        self._reap()
        sources = list({id(s): s for s in (self._sources[job.source] for job in jobs)}.values())
        copy = CudaPeerCopy(self, jobs, sources)
        batches: list[Batch] = []
        owners: list[int] = []
        for number, job in enumerate(jobs):
            for pull in job.groups:
                tables = self._sources[job.source].tables.get(pull.group, [])
                if not tables:  # nothing was read, so nothing is right
                    copy.refuse(number, pull.local)
                for table in tables if len(pull.local) else ():
                    self._check(table, pull)
                    batches.append(Batch(table, pull))
                    owners.append(number)
                    copy.nbytes += len(pull.local) * table.block_bytes
        if not batches:
            return copy
        sheet = self._sheet(most_words(batches, self._shape, self._max_rows), sum(len(b) for b in batches))
        sheet.verdicts[: sum(len(b) for b in batches)] = peer.BAD
        try:
            verdicts = sheet.address + sheet.words_capacity * 8
            rounds, places = pack(
                batches, sheet.words, verdicts, self._table.data_ptr(), self._shape, self._max_rows
            )
            if after is not None:
                self.driver.wait(self._stream.cuda_stream, after.cuda_event)
            for each in rounds:
                self._mover.launch(sheet.address + each.at * 8, each.words, each.rows, each.moves, self._stream)
            event = self._events.pop() if self._events else self.driver.new_event()
            self.driver.record(event, self._stream.cuda_stream)
        except Exception:
            # What was enqueued writes to blocks that are others' once this has raised.
            self._stream.synchronize()
            self._sheets.append(sheet)
            raise
        for source in sources:
            source.users += 1
        marks = [(owner, np.asarray(b.pull.local), first) for owner, b, (first, _) in zip(
            owners, batches, places, strict=True)]  # fmt: skip
        copy.begun(event, sheet, marks)
        self._under_way.append(copy)
        return copy

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.driver.enter()
        self._stream.synchronize()
        self._reap()
        for source in list(self._sources):
            self.forget(source)
        for event in self._events:
            self.driver.destroy_event(event)
        self._events.clear()
        self._sheets.clear()
        self.driver.close()

    # -- of a copy that ends ---------------------------------------------------------------------------------------

    def ended(self, copy: CudaPeerCopy, event: int, sheet: _Sheet, sources: list[_Source]) -> None:
        self._under_way.remove(copy)
        self._events.append(event)
        self._sheets.append(sheet)
        for source in sources:
            source.users -= 1
        self._unmap()

    def _reap(self) -> None:
        for copy in list(self._under_way):
            copy.done()

    def _unmap(self) -> None:
        gone = [source for source in self._leaving if not source.users]
        self._leaving = [source for source in self._leaving if source.users]
        for source in gone:
            self._close(source.mapped)

    def _close(self, mapped: Sequence[Mapped]) -> None:
        for each in mapped:
            try:
                self._mappings.close(each)
            except KVTierError as error:  # what was copied is right all the same
                logger.warning("kvtier: %s; that memory is not given back before this process ends", error)

    # -- of a copy that begins -------------------------------------------------------------------------------------

    def _group_table(self, group: PartGroup, num_blocks: int, sums_base: int, translate) -> GroupTable:
        return GroupTable(group, num_blocks, sums_base, translate, self._device, self._shape)

    def _compile(self, tables: Sequence[GroupTable]) -> None:
        flags = {kind.flags for table in tables for kind in table.kinds} - self._compiled
        if flags:
            if not self._sheets:
                self._sheets.append(_Sheet(1 << 15, 1 << 11))
            self._mover.launch(self._sheets[-1].address, 0, 0, [(each, 0, 0, 0) for each in flags], self._stream)
            self._compiled |= flags

    def _check(self, table: GroupTable, pull) -> None:
        """Raises ValueError for what would make the kernel read or write what is no block."""
        shapes = {np.shape(a) for a in (pull.local, pull.remote, pull.keys, pull.valid)}
        if len(shapes) > 1:
            raise ValueError(f"lists of blocks of shapes {sorted(shapes)}")
        for ids, count in ((pull.local, self._view.num_blocks), (pull.remote, table.num_blocks)):
            if int(ids.min()) < 0 or int(ids.max()) >= count:
                raise ValueError(f"blocks {ids.min()}..{ids.max()} outside 0..{count - 1}")

    def _sheet(self, words: int, rows: int) -> _Sheet:
        for i, sheet in enumerate(self._sheets):
            if sheet.words_capacity >= words and sheet.rows_capacity >= rows:
                return self._sheets.pop(i)
        return _Sheet(max(1 << 15, 1 << (words - 1).bit_length()), max(1 << 11, 1 << (padded(rows) - 1).bit_length()))


def _as_it_is(address: int, nbytes: int) -> int:
    return address
