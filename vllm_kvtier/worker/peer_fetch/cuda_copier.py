"""Copies from other GPUs' caches, mapped into this process: a kernel on a stream of its own reads, verifies and stores.

See ``worker.peer_fetch.base.PeerCopier`` for the contract. The kernel reads any address over NVLink or PCIe, so this
module checks all addresses: nothing outside the memory that the source shares is touched. A launched kernel ends by
itself, even when the source's process dies: a mapping keeps the memory.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.kernels import peer_copy, peer_copy_plan
from vllm_kvtier.logs import get_logger
from vllm_kvtier.shapes.tp_mapping import SourceGroup, SourceRank, SourceRegion
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.pinned_buffers import PinnedArgs
from vllm_kvtier.worker.device.cuda_driver import Driver
from vllm_kvtier.worker.peer_fetch.base import Copy, CopyJob
from vllm_kvtier.worker.peer_fetch.cuda_ipc import Mapped, Mappings
from vllm_kvtier.worker.peer_fetch.kernel_args import Batch, GroupTable, max_words, pack, padded, room

logger = get_logger(__name__)


class _Source:
    def __init__(self, mapped: list[Mapped], tables: dict[int, list[GroupTable]]):
        self.mapped, self.tables = mapped, tables  # tables: by group, one for each rank that is read
        self.users = 0  # copies under way
        self.leaving = False


class CudaPeerCopy(Copy):
    poll_seconds = 50e-6  # the driver's own wait for an event has no deadline

    def __init__(self, copier: "CudaPeerCopier", jobs: Sequence[CopyJob], sources: list[_Source]):
        super().__init__(len(jobs))
        self._copier, self._sources = copier, sources
        self._event: int | None = None
        self._args: PinnedArgs | None = None
        self._result_slots: list[tuple[int, np.ndarray, int]] = []  # job, our blocks, first result

    def begun(self, event: int, args: PinnedArgs, result_slots: list[tuple[int, np.ndarray, int]]) -> None:
        self._event, self._args, self._result_slots = event, args, result_slots

    def done(self) -> bool:
        if self._event is None:
            return True
        if not self._copier.driver.reached(self._event):
            return False
        for job, blocks, first in self._result_slots:
            wrong = self._args.results[first : first + len(blocks)] != peer_copy.GOOD
            self._bad[job].update(blocks[wrong].tolist())
        event, args = self._event, self._args
        self._event = self._args = None
        self._copier.ended(self, event, args, self._sources)
        return True

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        if self._event is not None:
            self._copier.driver.wait(stream.cuda_stream, self._event)

    def refuse(self, job: int, blocks: np.ndarray) -> None:
        self._bad[job].update(blocks.tolist())


class CudaPeerCopier:
    """See ``worker.peer_fetch.base.PeerCopier``."""

    def __init__(
        self,
        view: CacheView,
        table: torch.Tensor,
        shape: peer_copy_plan.Shape = peer_copy_plan.SHAPE,
        checked: bool = True,
        driver: Driver | None = None,
        mappings: Mappings | None = None,
    ):
        """``table``: int64 [num_blocks], our checksums, on the view's device. ``checked``: False leaves checksums and
        results out, for measurements: all blocks are then reported bad. ``driver``, ``mappings`` replace the device's
        own.

        Raises RuntimeError without Triton or a driver.
        """
        self._view, self._table, self._shape = view, table, shape
        self._device = view.device
        if self._device.index is None:
            self._device = torch.device(self._device.type, torch.cuda.current_device())
        self.driver = driver or Driver(self._device.index)
        self._mappings = mappings or Mappings(self.driver)
        self.driver.enter()
        with torch.cuda.device(self._device):
            # Before the model's kernels (0), as loads: the kernel takes a few SMs for a moment, and would otherwise
            # wait behind each kernel of a prefill.
            self._stream = torch.cuda.Stream(self._device, priority=-2)
            # Allocated for that stream: the model's stream may still write memory that it gave back.
            with torch.cuda.stream(self._stream):
                scratch = (
                    torch.empty(room(shape), dtype=torch.int64, device=self._device),
                    torch.empty(shape.max_rows, dtype=torch.int64, device=self._device),
                )
        self._page_copier = peer_copy.PeerPageCopier(scratch, shape, checked, self.driver.launcher)
        self._sources: dict[str, _Source] = {}
        self._leaving: list[_Source] = []
        self._under_way: list[CudaPeerCopy] = []
        self._events: list[int] = []
        self._spare_args: list[PinnedArgs] = []
        self._compiled: set[tuple] = set()
        self._closed = False

    def warm_up(self) -> None:
        """Compile the kernels for copies from an engine with this engine's layout (seconds)."""
        whole = {
            g.group: SourceGroup(g.group, tuple(SourceRegion(r, r, 0, r.outer, 0) for r in g.regions), True)
            for g in self._view.groups
        }
        self.driver.enter()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._compile([self._group_table(g, self._view.num_blocks, 0, _same_address) for g in whole.values()])

    def add(self, instance: str, parts: Sequence[SourceRank]) -> None:
        if instance in self._sources:
            return
        self.driver.enter()
        mapped: list[Mapped] = []
        tables: dict[int, list[GroupTable]] = defaultdict(list)
        try:
            # Uploads on this stream do not wait for the model.
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for part in parts:
                    info = part.source
                    mapped.append(self._mappings.open(info.shared))
                    for group in part.groups:
                        tables[group.group].append(
                            self._group_table(group, info.num_blocks, info.checksum_table_addr, mapped[-1].translate)
                        )
                self._compile([table for each in tables.values() for table in each])
        except Exception as error:
            self._close(mapped)
            if isinstance(error, ValueError):  # pages that do not lie at multiples of 4 bytes
                raise KVTierError(f"the pages of {instance} cannot be copied: {error}") from error
            raise
        self._sources[instance] = _Source(mapped, dict(tables))

    def remove(self, instance: str) -> None:
        found = self._sources.pop(instance, None)
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
        sources = list({id(s): s for s in (self._sources[job.instance] for job in jobs)}.values())
        copy = CudaPeerCopy(self, jobs, sources)
        batches: list[Batch] = []
        owners: list[int] = []
        for number, job in enumerate(jobs):
            for pull in job.groups:
                tables = self._sources[job.instance].tables.get(pull.group, [])
                if pull.shifts is None and any(table.shift for table in tables):
                    tables = []  # blocks have other sizes there, and it is unknown which part goes
                read = np.zeros(len(pull.local), bool)
                for table in tables if len(pull.local) else ():
                    self._check(table, pull)
                    rows = pull.at_shift(table.shift)
                    read |= (0 if pull.shifts is None else pull.shifts) == table.shift
                    if len(rows.local):
                        batches.append(Batch(table, rows))
                        owners.append(number)
                        copy.nbytes += len(rows.local) * table.block_bytes
                copy.refuse(number, pull.local[~read])  # nothing is read of them
        if not batches:
            return copy
        args = self._take_args(max_words(batches, self._shape), sum(len(b) for b in batches))
        args.results[: sum(len(b) for b in batches)] = peer_copy.BAD
        try:
            rounds, result_slots = pack(batches, args.words, args.results_address, self._table.data_ptr(), self._shape)
            if after is not None:
                self.driver.wait(self._stream.cuda_stream, after.cuda_event)
            for each in rounds:
                self._page_copier.launch(args.address + each.at * 8, each.words, each.rows, each.moves, self._stream)
            event = self._events.pop() if self._events else self.driver.new_event()
            self.driver.record(event, self._stream.cuda_stream)
        except Exception:
            # Once this has raised, vLLM may reuse the blocks that the enqueued kernels write.
            self._stream.synchronize()
            self._spare_args.append(args)
            raise
        for source in sources:
            source.users += 1
        marks = [(owner, np.asarray(b.pull.local), first) for owner, b, (first, _) in zip(
            owners, batches, result_slots, strict=True)]  # fmt: skip
        copy.begun(event, args, marks)
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
            self.remove(source)
        for event in self._events:
            self.driver.destroy_event(event)
        self._events.clear()
        self._spare_args.clear()
        self.driver.close()

    # -- of a copy that ends ---------------------------------------------------------------------------------------

    def ended(self, copy: CudaPeerCopy, event: int, args: PinnedArgs, sources: list[_Source]) -> None:
        self._under_way.remove(copy)
        self._events.append(event)
        self._spare_args.append(args)
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
            except KVTierError as error:  # the copies are valid nevertheless
                logger.warning("kvtier: peer fetch: %s; the memory stays mapped until this process ends", error)

    # -- of a copy that begins -------------------------------------------------------------------------------------

    def _group_table(self, group: SourceGroup, num_blocks: int, checksum_table_addr: int, translate) -> GroupTable:
        return GroupTable(group, num_blocks, checksum_table_addr, translate, self._device, self._shape)

    def _compile(self, tables: Sequence[GroupTable]) -> None:
        flags = {kind.flags for table in tables for kind in table.kinds} - self._compiled
        if flags:
            if not self._spare_args:
                self._spare_args.append(PinnedArgs(1 << 15, 1 << 11))
            moves = [(each, 0, 0, 0) for each in flags]
            self._page_copier.launch(self._spare_args[-1].address, 0, 0, moves, self._stream)
            self._compiled |= flags

    def _check(self, table: GroupTable, pull) -> None:
        """Raises ValueError for ids by which the kernel would read or write outside the blocks."""
        shapes = {np.shape(a) for a in (pull.local, pull.remote, pull.keys, pull.valid)}
        if len(shapes) > 1:
            raise ValueError(f"lists of blocks of shapes {sorted(shapes)}")
        for ids, count in ((pull.local, self._view.num_blocks), (pull.remote, table.num_blocks)):
            if int(ids.min()) < 0 or int(ids.max()) >= count:
                raise ValueError(f"blocks {ids.min()}..{ids.max()} outside 0..{count - 1}")

    def _take_args(self, words: int, rows: int) -> PinnedArgs:
        for i, args in enumerate(self._spare_args):
            if args.num_words >= words and args.num_rows >= rows:
                return self._spare_args.pop(i)
        return PinnedArgs(
            max(1 << 15, 1 << (words - 1).bit_length()), max(1 << 11, 1 << (padded(rows) - 1).bit_length())
        )


def _same_address(address: int, nbytes: int) -> int:
    return address
