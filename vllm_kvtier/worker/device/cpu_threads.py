"""Keeps torch's operations of a thread on one core: the model needs the others."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Within, torch's operations on this thread use no other thread; other threads are not affected.

    ``torch.set_num_threads`` would also change threads that begin later. This changes settings of the OpenMP runtime
    and of MKL that each thread has for itself. No effect where torch is built without OpenMP.
    """
    before = torch.get_num_threads()  # this also makes torch set up the thread, which later would reset the settings
    if before == 1:
        yield
        return
    parallel, products = _settings()
    parallel(1)
    local = products(1)
    try:
        yield
    finally:
        products(local)
        parallel(before)


def stay_on_one_core() -> None:
    """The same for all later operations of the calling thread.

    It also keeps the model fast: if more threads than cores have helper threads, the OpenMP runtime stops the helpers
    from spinning between the many small operations of a model. Each operation then waits until its helpers wake up,
    three times as long on two cores."""
    torch.get_num_threads()
    for each in _settings():
        each(1)


@functools.cache
def _settings() -> tuple[Callable[[int], int | None], Callable[[int], int | None]]:
    """``omp_set_num_threads`` and ``MKL_Set_Num_Threads_Local`` (which returns the previous number) of the libraries
    that torch uses; a function that does nothing for a library that it does not use."""
    return _function("omp_set_num_threads", None), _function("MKL_Set_Num_Threads_Local", ctypes.c_int)


def _function(name: str, result: type | None) -> Callable[[int], int | None]:
    # torch also uses a preloaded runtime before its own.
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            found = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = [ctypes.c_int], result
        return found
    return lambda _: None
