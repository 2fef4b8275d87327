"""CUDA driver calls for copies: pinning, batches of copies, events, launches, memory of other processes.

Copies are begun on the model runner's thread, where each microsecond counts: torch's objects take several times as long
as the driver's call. Calls that return at once keep the GIL, since getting it back from another thread can take
milliseconds. Calls that may wait (pinning, synchronizing, large batches) release it.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from uuid import UUID

from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

_SIZE, _PTR, _INT, _UINT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_ADDRESS = ctypes.c_uint64

_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_*
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
# CUmemcpySrcAccessOrder: in the stream's order, or at any time (the source is not being written).
ORDERED, ANY_ORDER = 1, 3
FEW_COPIES = 16  # a call for as many takes some microseconds: less than to wait for the interpreter afterwards


class CudaError(RuntimeError):
    """A driver call that failed; the message has the call, the driver's name of the error and its description."""


class _Location(ctypes.Structure):
    _fields_ = [("type", _INT), ("id", _INT)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes (cuda.h)."""

    _fields_ = [("order", _INT), ("source", _Location), ("target", _Location), ("flags", _UINT)]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D (cuda.h)."""

    _fields_ = [
        ("src_x", _SIZE), ("src_y", _SIZE), ("src_type", _INT), ("src_host", _PTR), ("src", _ADDRESS),
        ("src_array", _PTR), ("src_pitch", _SIZE),
        ("dst_x", _SIZE), ("dst_y", _SIZE), ("dst_type", _INT), ("dst_host", _PTR), ("dst", _ADDRESS),
        ("dst_array", _PTR), ("dst_pitch", _SIZE), ("width", _SIZE), ("height", _SIZE),
    ]  # fmt: skip


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle (cuda.h), passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


_SIGNATURES = {
    "cuInit": [_UINT],
    "cuGetErrorName": [_INT, ctypes.POINTER(ctypes.c_char_p)],
    "cuGetErrorString": [_INT, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(_INT), _INT],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_PTR), _INT],
    "cuDevicePrimaryCtxRelease_v2": [_INT],
    "cuCtxGetCurrent": [ctypes.POINTER(_PTR)],
    "cuCtxSetCurrent": [_PTR],
    "cuMemHostRegister_v2": [_PTR, _SIZE, _UINT],
    "cuMemHostUnregister": [_PTR],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(_ADDRESS), _PTR, _UINT],
    "cuMemcpyAsync": [_ADDRESS, _ADDRESS, _SIZE, _PTR],
    "cuMemcpy2DAsync_v2": [ctypes.POINTER(_Copy2D), _PTR],
    "cuMemsetD32Async": [_ADDRESS, _UINT, _SIZE, _PTR],
    "cuEventCreate": [ctypes.POINTER(_PTR), _UINT],
    "cuEventDestroy_v2": [_PTR],
    "cuEventRecord": [_PTR, _PTR],
    "cuEventQuery": [_PTR],
    "cuEventSynchronize": [_PTR],
    "cuStreamWaitEvent": [_PTR, _PTR, _UINT],
    "cuStreamIsCapturing": [_PTR, ctypes.POINTER(_INT)],
    "cuDeviceGetUuid_v2": [_PTR, _INT],
    "cuMemGetAddressRange_v2": [ctypes.POINTER(_ADDRESS), ctypes.POINTER(_SIZE), _ADDRESS],
    "cuIpcGetMemHandle": [_PTR, _ADDRESS],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_ADDRESS), _IpcHandle, _UINT],
    "cuIpcCloseMemHandle": [_ADDRESS],
    # function, grid x 3, block x 3, shared bytes, stream, addresses of the arguments, extra
    "cuLaunchKernel": [_PTR, *[_UINT] * 7, _PTR, _PTR, _PTR],
}
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
IPC_HANDLE_BYTES = ctypes.sizeof(_IpcHandle)
# The CUDA 12.8 form, which newer drivers keep under this name: (targets, sources, sizes, count, attributes,
# first copy of each attribute, attributes, index of the copy that failed, stream).
_BATCH = [_PTR, _PTR, _PTR, _SIZE, ctypes.POINTER(_Attributes), ctypes.POINTER(_SIZE), _SIZE, _PTR, _PTR]


@cache
def _library(quick: bool = False) -> ctypes.CDLL:
    """``quick``: calls keep the GIL."""
    try:
        library = (ctypes.PyDLL if quick else ctypes.CDLL)("libcuda.so.1")
    except OSError as error:  # not its cause: other OSErrors pass
        raise CudaError(f"the CUDA driver cannot be loaded ({error}): is the NVIDIA driver visible here?") from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _INT
    try:
        library.cuMemcpyBatchAsync.argtypes, library.cuMemcpyBatchAsync.restype = _BATCH, _INT
    except AttributeError:  # drivers before CUDA 12.8
        pass
    return library


class Driver:
    """Driver calls in the context that torch uses on one device. For one thread at a time."""

    def __init__(self, device: int):
        self._cuda, quick = _library(), _library(quick=True)
        self._record, self._wait, self._query = quick.cuEventRecord, quick.cuStreamWaitEvent, quick.cuEventQuery
        self._launch, self._current, self._lines = quick.cuLaunchKernel, quick.cuCtxGetCurrent, quick.cuMemcpy2DAsync_v2
        self._set = quick.cuMemsetD32Async
        self._check("cuInit", self._cuda.cuInit(0))
        number = _INT()
        self._check("cuDeviceGet", self._cuda.cuDeviceGet(ctypes.byref(number), device))
        self._number = number.value
        self._context = _PTR()
        result = self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._number)
        self._check("cuDevicePrimaryCtxRetain", result)
        self.batches = hasattr(self._cuda, "cuMemcpyBatchAsync")
        if self.batches:
            self._few_copies, self._many_copies = quick.cuMemcpyBatchAsync, self._cuda.cuMemcpyBatchAsync
        # Arguments of these, made once: making them takes as long as the call.
        self._first, self._failed = ctypes.byref(_SIZE(0)), _SIZE(0)
        self._attributes = {order: ctypes.byref(_Attributes(order=order)) for order in (ORDERED, ANY_ORDER)}
        self._failed_at = ctypes.addressof(self._failed)

    def close(self) -> None:
        if self._context:
            self._context = None
            self._cuda.cuDevicePrimaryCtxRelease_v2(self._number)

    def _check(self, call: str, result: int, what: str = "") -> None:
        if result:
            name, words = ctypes.c_char_p(), ctypes.c_char_p()
            self._cuda.cuGetErrorName(result, ctypes.byref(name))
            self._cuda.cuGetErrorString(result, ctypes.byref(words))
            title, reason = ((w.value or b"unknown").decode() for w in (name, words))
            raise CudaError(f"{call} failed{what}: {title} ({result}), {reason}")

    def enter(self) -> None:
        """Make the device's context current; a thread that torch never used has none."""
        current = _PTR()
        self._check("cuCtxGetCurrent", self._current(ctypes.byref(current)))
        if current.value != self._context.value:
            self._check("cuCtxSetCurrent", self._cuda.cuCtxSetCurrent(self._context))

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory and map it for the device at the same address, for every context of the process.

        Raises CudaError if the driver refuses, or maps it elsewhere (no unified addressing).
        """
        self.enter()
        what = f" for {nbytes} bytes at {address:#x}"
        self._check("cuMemHostRegister", self._cuda.cuMemHostRegister_v2(address, nbytes, _PORTABLE | _MAPPED), what)
        there = _ADDRESS()
        result = self._cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(there), address, 0)
        if result or there.value != address:
            self._cuda.cuMemHostUnregister(address)
            self._check("cuMemHostGetDevicePointer", result, what)
            raise CudaError(f"the device maps host memory {address:#x} at {there.value:#x}; copies need one address")

    def unregister(self, address: int) -> None:
        self.enter()
        self._check("cuMemHostUnregister", self._cuda.cuMemHostUnregister(address), f" for {address:#x}")

    def copy_batch(self, targets: int, sources: int, sizes: int, n: int, stream: int, order: int) -> None:
        """Enqueue ``n`` copies on a stream, at least one, in one call if the driver can. ``targets``, ``sources``,
        ``sizes``: where their addresses and bytes are, uint64 [n] each; they are read before this returns. ``order``:
        ORDERED or ANY_ORDER. The stream must not be the default one.
        """
        if self.batches:
            copy = self._few_copies if n <= FEW_COPIES else self._many_copies
            attributes = self._attributes[order]
            result = copy(targets, sources, sizes, n, attributes, self._first, 1, self._failed_at, stream)
            if result:
                self._check("cuMemcpyBatchAsync", result, f" for copy {self._failed.value} of {n}")
            return
        arrays = [(_ADDRESS * n).from_address(address) for address in (targets, sources, sizes)]
        for target, source, size in zip(*arrays, strict=True):
            self._check("cuMemcpyAsync", self._cuda.cuMemcpyAsync(target, source, size, stream))

    def copy_lines(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Enqueue one copy of ``height`` lines of ``width`` bytes, at constant distances on both sides."""
        order = _Copy2D(
            src_type=_UNIFIED, src=source, src_pitch=source_pitch,
            dst_type=_UNIFIED, dst=target, dst_pitch=target_pitch, width=width, height=height,
        )  # fmt: skip
        self._check("cuMemcpy2DAsync", self._lines(ctypes.byref(order), stream))

    def set_word(self, address: int, stream: int) -> None:
        """Enqueue a kernel that sets 4 bytes of the device to 0. While it runs, the stream has no work for the DMA
        engines."""
        result = self._set(address, 0, 1, stream)
        if result:
            self._check("cuMemsetD32Async", result)

    # -- memory of other processes -------------------------------------------------------------------------------

    def uuid(self) -> str:
        """This GPU's UUID, the same in processes that number GPUs differently."""
        found = (ctypes.c_ubyte * 16)()
        self._check("cuDeviceGetUuid", self._cuda.cuDeviceGetUuid_v2(ctypes.addressof(found), self._number))
        return "GPU-" + str(UUID(bytes=bytes(found)))

    def address_range(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation that an address on the device lies in."""
        self.enter()
        base, nbytes = _ADDRESS(), _SIZE()
        result = self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), address)
        self._check("cuMemGetAddressRange", result, f" for {address:#x}")
        return base.value, nbytes.value

    def ipc_handle(self, base: int) -> bytes:
        """The handle by which another process maps the allocation at ``base``."""
        self.enter()
        handle = _IpcHandle()
        result = self._cuda.cuIpcGetMemHandle(ctypes.addressof(handle), base)
        self._check("cuIpcGetMemHandle", result, f" for the allocation at {base:#x}")
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's allocation; its address here. May wait for the device.

        Raises CudaError if the driver refuses: the process has ended, or this GPU cannot reach the other.
        """
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaError(f"a CUDA IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        self.enter()
        address = _ADDRESS()
        opened = _IpcHandle.from_buffer_copy(handle)
        result = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), opened, _LAZY_PEER_ACCESS)
        self._check("cuIpcOpenMemHandle", result)
        return address.value

    def close_ipc(self, address: int) -> None:
        """Unmap it; no kernel may be reading it. May wait for the device."""
        self.enter()
        self._check("cuIpcCloseMemHandle", self._cuda.cuIpcCloseMemHandle(address), f" for {address:#x}")

    # -- events and launches, by handle; streams too -------------------------------------------------------------

    def new_event(self) -> int:
        """An event that has never been recorded: it counts as reached."""
        event = _PTR()
        self._check("cuEventCreate", self._cuda.cuEventCreate(ctypes.byref(event), _NO_TIMING))
        return event.value

    def destroy_event(self, event: int) -> None:
        self._check("cuEventDestroy", self._cuda.cuEventDestroy_v2(event))

    def record(self, event: int, stream: int) -> None:
        result = self._record(event, stream)
        if result:
            self._check("cuEventRecord", result)

    def wait(self, stream: int, event: int) -> None:
        """Work enqueued on ``stream`` from now on waits for the event as it was recorded last."""
        result = self._wait(stream, event, 0)
        if result:
            self._check("cuStreamWaitEvent", result)

    def reached(self, event: int) -> bool:
        result = self._query(event)
        if result and result != _NOT_READY:
            self._check("cuEventQuery", result, ": the device failed, or an earlier copy or kernel did")
        return not result

    def is_capturing(self, stream: int) -> bool:
        """Whether what is enqueued on the stream becomes part of a graph now."""
        state = _INT()
        self._check("cuStreamIsCapturing", self._cuda.cuStreamIsCapturing(stream, ctypes.byref(state)))
        return state.value != 0

    def synchronize(self, event: int) -> None:
        self._check("cuEventSynchronize", self._cuda.cuEventSynchronize(event))

    @property
    def launcher(self) -> Callable[..., None] | None:
        """:meth:`launch`, for kernels that Triton compiled. None if the installed Triton passes a kernel arguments that
        are not known here: then Triton's own launcher must be used."""
        return self.launch if granted(Feature.LAUNCHER) else None

    def launch(self, function: int, grid: int, threads: int, shared: int, stream: int, arguments: ctypes.Array) -> None:
        """Launch a kernel; ``arguments``: an array of addresses of its arguments."""
        result = self._launch(function, grid, 1, 1, threads, 1, 1, shared, stream, arguments, None)
        if result:
            self._check("cuLaunchKernel", result)
