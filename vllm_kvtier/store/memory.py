"""The pool's memory: one sealed memfd, made usable piece by piece behind the server's back.

Nothing is named, so nothing can collide or be left behind: the memory lives as long as a process holds or maps
it. It is sealed at its size, because a client that truncated it would kill everybody else with SIGBUS.

Touching memory costs more than serving may wait (about a second for 2 GiB), so threads of low priority do it, from
the start of the pool on, and one reports how far they are. They fault pages in through a mapping
(MADV_POPULATE_WRITE), not with fallocate alone: that would leave clearing them to the first copy or to CUDA's
registration. The mapping is as short as a piece; each call covers little, because it holds up every other change
of this process's address space.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.limits import MemoryLimits, in_words, memory_limits
from vllm_kvtier.store.messages import PAGE, PIECE

logger = get_logger(__name__)

HUGE_PAGE = 2 << 20  # bytes
FIRST_STEPS = (16 << 20, 64 << 20)  # bytes that are ready before the first whole piece, so that serving starts
CALL = 8 << 20  # bytes touched in one system call: a few milliseconds
MOST_HANDS = 4  # threads at it, one for eight cores: each touches 1 to 3 GB/s, less than an engine fills
_NICENESS = 5
_MFD_HUGE_2MB = 21 << 26
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PoolMemory:
    """``fd``: the memfd, ``nbytes`` long. ``ready``: bytes usable from the start, grows. ``note``: "" or why
    ``usable`` is less than ``nbytes``. Raises KVTierError if there is no such memory at all."""

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: str = "auto",
        interleave: bool = False,
        limits: Callable[[], MemoryLimits] = memory_limits,
    ):
        if nbytes <= 0 or nbytes % PAGE:
            raise ValueError(f"{nbytes} bytes are no whole pages")
        self._limits = limits
        self._nodes = memory_nodes() if interleave else []
        self.huge_pages = False
        self.nbytes = self.usable = nbytes
        self.fd = -1
        if huge_pages != "never":
            self._try_huge(nbytes, must=huge_pages == "always")
        if self.fd < 0:
            self.fd = _make(nbytes, 0)
        self._transparent = huge_pages == "auto" and not self.huge_pages and transparent_allowed()
        self.ready = 0
        self.note = ""
        self._populates = True
        self._on_progress: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_progress: Callable[[], None]) -> None:
        """Begin; ``on_progress()`` is called on a thread of its own whenever ``ready`` or ``usable`` changed."""
        self._on_progress = on_progress
        self._thread = threading.Thread(target=self._run, name="kvtier-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and give the descriptor back; clients' mappings stay valid. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- making it ----------------------------------------------------------------------------------------------

    def _try_huge(self, nbytes: int, must: bool) -> None:
        rounded = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        free = free_huge_pages() * HUGE_PAGE
        why = f"{in_words(free)} of 2 MiB pages are free"
        if free >= rounded:
            try:
                self.fd = _make(rounded, os.MFD_HUGETLB | _MFD_HUGE_2MB)
                # Mapping it once reserves the pages: nobody can take them between now and their first use.
                mmap.mmap(self.fd, rounded).close()
                self.huge_pages, self.nbytes, self.usable = True, rounded, rounded
                return
            except OSError as error:
                why = f"the kernel refused them: {error.strerror}"
                if self.fd >= 0:
                    os.close(self.fd)
                    self.fd = -1
        if must:
            raise KVTierError(
                f"no huge pages for a pool of {in_words(rounded)}: {why}; reserve {rounded // HUGE_PAGE} with "
                "`sysctl vm.nr_hugepages`, or use --huge-pages=auto"
            )

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        hands = ThreadPoolExecutor(
            min(MOST_HANDS, max(1, len(os.sched_getaffinity(0)) // 8)), "kvtier-memory", self._prepare_thread
        )
        with hands:
            while self.ready < self.usable and not self._stop.is_set():
                end = self.ready + next_step(self.ready, self.usable)
                try:
                    self._make_usable(self.ready, end, hands)
                except OSError as error:
                    if not self._stop.is_set():
                        self._give_up(error)
                    return
                if not self._stop.is_set():
                    self.ready = end
                    self._on_progress()

    def _prepare_thread(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        place_this_thread(self._nodes if len(self._nodes) > 1 else [])

    def _make_usable(self, start: int, end: int, hands: ThreadPoolExecutor) -> None:
        if not self.huge_pages:  # those are reserved already
            limits = self._limits()
            if limits.fits < end - start:
                # Asking the kernel instead would wake the OOM killer.
                raise OSError(errno.ENOMEM, f"{limits.source} has only {in_words(limits.free)} left")
        if not self._populates:
            hands.submit(os.posix_fallocate, self.fd, start, end - start).result()
            return
        mapping = mmap.mmap(self.fd, end - start, offset=start)
        try:
            view = (ctypes.c_char * (end - start)).from_buffer(mapping)
            address = ctypes.addressof(view)
            del view
            if self._transparent:
                _libc.madvise(address, end - start, _MADV_HUGEPAGE)  # advice: a refusal changes nothing
            jobs = [
                hands.submit(self._populate, address + offset, start + offset, min(CALL, end - start - offset))
                for offset in range(0, end - start, CALL)
            ]
            wait(jobs)  # all of them, or one would touch what is no longer mapped
            for job in jobs:
                job.result()
        finally:
            mapping.close()

    def _populate(self, address: int, offset: int, length: int) -> None:
        if self._stop.is_set():
            return
        while self._populates and _libc.madvise(address, length, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # before Linux 5.14
                self._populates = False
            elif code not in (errno.EAGAIN, errno.EINTR):
                raise OSError(code, os.strerror(code))
        if not self._populates:
            os.posix_fallocate(self.fd, offset, length)

    def _give_up(self, error: OSError) -> None:
        """Serve with what there is. Not tried again: memory that was short once would be short at the worst time."""
        self.usable = self.ready
        self.note = (
            f"only {in_words(self.ready)} of the {in_words(self.nbytes)} asked for could be had: "
            f"{error.strerror or error}; the store serves with that"
        )
        logger.warning("kvtier: %s", self.note)
        self._on_progress()


def next_step(ready: int, usable: int) -> int:
    """Bytes to make ready next: small at first, then up to the next multiple of PIECE."""
    for boundary in FIRST_STEPS:
        if ready < boundary:
            return min(boundary, usable) - ready
    return min((ready // PIECE + 1) * PIECE, usable) - ready


def free_huge_pages() -> int:
    """2 MiB pages that are reserved for huge pages and promised to nobody."""
    folder = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    try:
        free, promised = (int((folder / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except (OSError, ValueError):
        return 0
    return max(0, free - promised)


def transparent_allowed() -> bool:
    """Does the kernel give shared memory transparent huge pages to those who ask?"""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return any(f"[{word}]" in text for word in ("advise", "within_size", "always", "force"))


def memory_nodes() -> list[int]:
    """NUMA nodes with memory; [] where the kernel does not say."""
    try:
        text = Path("/sys/devices/system/node/has_memory").read_text().strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def place_this_thread(nodes: list[int]) -> None:
    """Spread what this thread touches first over the nodes; [] lets the kernel decide, whatever policy was inherited.

    Only logged where the kernel refuses.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        if nodes:
            logger.warning("kvtier: numa=interleave is not known for %s; it has no effect", platform.machine())
        return
    words = (ctypes.c_ulong * (max(nodes, default=0) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    mode, size = (_MPOL_INTERLEAVE, len(words) * 64 + 1) if nodes else (_MPOL_DEFAULT, 0)
    arguments = (ctypes.c_long(number), ctypes.c_int(mode), words if nodes else None, ctypes.c_ulong(size))
    if _libc.syscall(*arguments):
        # A container may forbid the call altogether; then there is no inherited policy to undo either.
        level = logging.WARNING if nodes else logging.DEBUG
        logger.log(level, "kvtier: the memory's place could not be set: %s", os.strerror(ctypes.get_errno()))


def _make(nbytes: int, flags: int) -> int:
    fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
