"""Calls of Linux, through the C library: ``os`` and ``signal`` have most of them only if Python was built where they
were known, and conda's was not. They raise OSError as those of ``os``."""

import ctypes
import mmap
import os

MFD_ALLOW_SEALING, MFD_HUGETLB = 2, 4  # linux/memfd.h
_MFD_CLOEXEC = 1
F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1, 2, 4  # linux/fcntl.h
O_TMPFILE = 0o20000000 | os.O_DIRECTORY  # asm-generic/fcntl.h
_MADV_DONTDUMP = 16
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # on every architecture

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memfd_create.argtypes = (ctypes.c_char_p, ctypes.c_uint)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.argtypes = (ctypes.c_long,) * 5


def memfd_create(name: str, flags: int = 0) -> int:
    return _checked(_libc.memfd_create(name.encode(), flags | _MFD_CLOEXEC))


def pidfd_open(pid: int) -> int:
    return _checked(_libc.syscall(_PIDFD_OPEN, pid, 0, 0, 0))


def pidfd_send_signal(pidfd: int, number: int) -> None:
    _checked(_libc.syscall(_PIDFD_SEND_SIGNAL, pidfd, number, 0, 0))


def leave_out_of_dumps(address: int, nbytes: int) -> None:
    """Leave memory for KV out of core dumps: that of a process that maps a store's pool would have what all engines
    stored there, and commit the rest. Advice: a refusal changes nothing."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    _libc.madvise(start, address + nbytes - start, _MADV_DONTDUMP)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
