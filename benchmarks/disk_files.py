"""Files of a benchmark's directory: their size on disk, the processes that read them, and the rates of the disk."""

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

IO_BYTES, IO_THREADS = 4 << 20, 8


def bytes_read(pid: int, count: str = "read_bytes") -> int:
    """Bytes that a process had read, by the kernel's account; ``count``: "read_bytes", from devices, or "rchar", with
    read() from whatever it was, sockets too."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0  # it ended, or this kernel does not account
    return sum(int(line.split()[1]) for line in lines if line.startswith(count))


def files_in(folder: Path) -> list[os.DirEntry]:
    found, folders = [], [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    (folders if entry.is_dir(follow_symlinks=False) else found).append(entry)
        except FileNotFoundError:
            continue
    return found


def allocated(folder: Path) -> int:
    """Bytes that its files take on the disk."""
    total = 0
    for entry in files_in(folder):
        try:
            total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue  # a temporary one that got its name meanwhile
    return total


def drop_cached(folder: Path) -> None:
    """Have the kernel forget the contents of all files below, so that they are read from the disk."""
    for entry in files_in(folder):
        try:
            fd = os.open(entry.path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fdatasync(fd)  # what is not written cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def disk_rate(folder: Path, nbytes: int) -> dict:
    """GB/s of the file system, written and read with O_DIRECT; without where it cannot."""
    direct, path = os.O_DIRECT, folder / "rate"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | direct, 0o600))
    except OSError:
        direct = 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT | direct, 0o600)
    buffers = [mmap.mmap(-1, IO_BYTES) for _ in range(IO_THREADS)]
    for buffer in buffers:
        buffer.write(os.urandom(IO_BYTES))

    def each(move: Callable[[int, mmap.mmap, int], object]) -> float:
        def strand(number: int) -> None:
            for at in range(number * IO_BYTES, nbytes, IO_THREADS * IO_BYTES):
                move(fd, buffers[number], at)

        begin = time.perf_counter()
        with ThreadPoolExecutor(IO_THREADS) as pool:
            list(pool.map(strand, range(IO_THREADS)))
        os.fdatasync(fd)
        return nbytes / (time.perf_counter() - begin) / 1e9

    try:
        write = each(os.pwrite)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read = each(lambda fd, buffer, at: os.preadv(fd, [buffer], at))
    finally:
        os.close(fd)
        path.unlink()
    return {"write": round(write, 2), "read": round(read, 2), "direct": bool(direct)}
