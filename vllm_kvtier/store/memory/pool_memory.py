"""The pool's memory: one sealed memfd, committed in the background.

It has no name that could collide or be left behind: the memory lives as long as a process holds or maps it. Its size is
sealed, because a client that truncated it would kill all others with SIGBUS.

Committing memory takes about a second for 2 GiB, so threads of low priority do it, from the start of the pool on, and
report their progress. They fault pages in through a mapping (MADV_POPULATE_WRITE). fallocate alone would leave clearing
the pages to the first copy or to CUDA's registration. The mapping is one piece long, and each call is short, because it
blocks other changes of this process's address space.
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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store import linux
from vllm_kvtier.store.memory.memory_limits import (
    HUGE_PAGE,
    MemoryLimits,
    format_bytes,
    free_huge_pages,
    memory_limits,
)
from vllm_kvtier.store.protocol import PAGE, PIECE_BYTES

logger = get_logger(__name__)

FIRST_STEPS = (16 << 20, 64 << 20)  # bytes that are ready before the first whole piece, so that serving starts early
CALL_BYTES = 8 << 20  # bytes per system call: a few milliseconds
MAX_THREADS = 4  # one per eight cores; each commits 1 to 3 GB/s
_NICENESS = 5
_MFD_HUGE_2MB = 21 << 26
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PoolMemory:
    """``fd``: the memfd of ``nbytes``. ``ready``: bytes usable from the start; grows. ``note``: "" or why ``usable`` is
    less than ``nbytes``. Raises KVTierError if the memory cannot be made."""

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: str = "auto",
        interleave: bool = False,
        limits: Callable[[], MemoryLimits] = memory_limits,
    ):
        if nbytes <= 0 or nbytes % PAGE:
            raise ValueError(f"{nbytes} bytes is not a positive multiple of {PAGE}")
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
        """Start committing; ``on_progress()`` is called on another thread whenever ``ready`` or ``usable`` changed."""
        self._on_progress = on_progress
        self._thread = threading.Thread(target=self._run, name="kvtier-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and close the descriptor; clients' mappings stay valid. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- huge pages ---------------------------------------------------------------------------------------------

    def _try_huge(self, nbytes: int, must: bool) -> None:
        rounded = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        free = free_huge_pages() * HUGE_PAGE
        why = f"{format_bytes(free)} of 2 MiB pages are free"
        if free >= rounded:
            try:
                self.fd = _make(rounded, linux.MFD_HUGETLB | _MFD_HUGE_2MB)
                # Mapping it once reserves the pages for this file until their first use.
                mmap.mmap(self.fd, rounded).close()
                os.posix_fallocate(self.fd, 0, HUGE_PAGE)  # a container's limit shows at the first use only
                self.huge_pages, self.nbytes, self.usable = True, rounded, rounded
                return
            except OSError as error:
                why = f"the kernel refused them: {error.strerror}"
                if self.fd >= 0:
                    os.close(self.fd)
                    self.fd = -1
        if must:
            raise KVTierError(
                f"no huge pages for a pool of {format_bytes(rounded)}: {why}; reserve {rounded // HUGE_PAGE} with "
                "`sysctl vm.nr_hugepages`, or use --huge-pages=auto"
            )

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        threads = ThreadPoolExecutor(
            min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 8)), "kvtier-memory", self._prepare_thread
        )
        with threads:
            while self.ready < self.usable and not self._stop.is_set():
                end = self.ready + next_step(self.ready, self.usable)
                try:
                    self._commit(self.ready, end, threads)
                except OSError as error:
                    if not self._stop.is_set():
                        self._stop_committing(error)
                    return
                if not self._stop.is_set():
                    self.ready = end
                    self._on_progress()

    def _prepare_thread(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except OSError as error:  # an exception here would end the pool of threads, and the memory would never be ready
            logger.debug("kvtier: store: memory is committed without a lower priority (%s)", error.strerror)
        place_this_thread(self._nodes if len(self._nodes) > 1 else [])

    def _commit(self, start: int, end: int, threads: ThreadPoolExecutor) -> None:
        if not self.huge_pages:  # huge pages are reserved already
            limits = self._limits()
            if limits.fits < end - start:
                # Checked before the kernel would wake the OOM killer.
                raise OSError(errno.ENOMEM, f"{limits.source} has only {format_bytes(limits.free)} left")
        if not self._populates:
            _submit(threads, os.posix_fallocate, self.fd, start, end - start).result()
            return
        mapping = mmap.mmap(self.fd, end - start, offset=start)
        try:
            view = (ctypes.c_char * (end - start)).from_buffer(mapping)
            address = ctypes.addressof(view)
            del view
            linux.leave_out_of_dumps(address, end - start)
            if self._transparent:
                _libc.madvise(address, end - start, _MADV_HUGEPAGE)  # advice: a refusal changes nothing
            jobs = [
                _submit(threads, self._populate, address + at, start + at, min(CALL_BYTES, end - start - at))
                for at in range(0, end - start, CALL_BYTES)
            ]
            wait(jobs)  # all, before the mapping is closed
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

    def _stop_committing(self, error: OSError) -> None:
        """Serve with the memory committed so far. No retry: memory that is short once would be short again."""
        self.usable = self.ready
        self.note = (
            f"only {format_bytes(self.ready)} of the requested {format_bytes(self.nbytes)} could be committed "
            f"({error.strerror or error}); the store serves with that"
        )
        logger.warning("kvtier: store: %s", self.note)
        self._on_progress()


def _submit(threads: ThreadPoolExecutor, work: Callable[..., None], *args: int) -> Future[None]:
    """On this thread if no other can be started: the limit of processes."""
    try:
        return threads.submit(work, *args)
    except RuntimeError:
        done: Future[None] = Future()
        try:
            work(*args)
            done.set_result(None)
        except OSError as error:
            done.set_exception(error)
        return done


def next_step(ready: int, usable: int) -> int:
    """Bytes to make ready next: small at first, then up to the next multiple of PIECE_BYTES."""
    for boundary in FIRST_STEPS:
        if ready < boundary:
            return min(boundary, usable) - ready
    return min((ready // PIECE_BYTES + 1) * PIECE_BYTES, usable) - ready


def transparent_allowed() -> bool:
    """Whether the kernel grants transparent huge pages for shared memory on request."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return any(f"[{word}]" in text for word in ("advise", "within_size", "always", "force"))


def memory_nodes() -> list[int]:
    """NUMA nodes with memory; [] if the kernel does not report them."""
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
    """Interleave this thread's new pages over the nodes; []: reset an inherited policy. An error is only logged."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        if nodes:
            logger.warning("kvtier: store: numa=interleave is not supported on %s; ignored", platform.machine())
        return
    words = (ctypes.c_ulong * (max(nodes, default=0) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    mode, size = (_MPOL_INTERLEAVE, len(words) * 64 + 1) if nodes else (_MPOL_DEFAULT, 0)
    arguments = (ctypes.c_long(number), ctypes.c_int(mode), words if nodes else None, ctypes.c_ulong(size))
    if _libc.syscall(*arguments):
        # A container may forbid the call; then there is no inherited policy to reset either.
        level = logging.WARNING if nodes else logging.DEBUG
        logger.log(level, "kvtier: store: the NUMA policy could not be set (%s)", os.strerror(ctypes.get_errno()))


def _make(nbytes: int, flags: int) -> int:
    fd = linux.memfd_create("kvtier-pool", linux.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, linux.F_ADD_SEALS, linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
