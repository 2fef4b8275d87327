"""torch on the calling thread alone, where it would take all the cores that the model is computed with."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Within, torch's operations on this thread use no other; those of other threads are left alone.

    ``torch.set_num_threads`` would also tell threads that begin later. What it tells this one are settings of the
    OpenMP runtime's and of MKL's that each thread has for itself. No effect where torch is built without OpenMP.
    """
    before = torch.get_num_threads()  # and torch has set up this thread, which would undo the following
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
    """The same for all that the calling thread does from now on.

    It is also for the others' sake: where threads with helpers of their own are more than there are cores, the OpenMP
    runtime no longer has the helpers spin between the many small operations of a model, and each of these waits until
    its helpers wake up: three times as long, on two cores."""
    torch.get_num_threads()
    for each in _settings():
        each(1)


@functools.cache
def _settings() -> tuple[Callable[[int], int | None], Callable[[int], int | None]]:
    """``omp_set_num_threads`` and ``MKL_Set_Num_Threads_Local``, which returns what was set before, of the libraries
    that torch uses; functions that do nothing in place of what it does not have."""
    return _function("omp_set_num_threads", None), _function("MKL_Set_Num_Threads_Local", ctypes.c_int)


def _function(name: str, result: type | None) -> Callable[[int], int | None]:
    # A preloaded runtime comes before torch's own, for torch as well.
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            found = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = [ctypes.c_int], result
        return found
    return lambda _: None
