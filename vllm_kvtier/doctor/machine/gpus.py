"""GPUs, queried from the driver without a context, so that nothing is allocated on a device."""

import ctypes
import itertools
import os
from typing import Any

from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn

_NAME_BYTES = 128


def load_driver() -> Any | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def gpus(driver: Any | None, device_nodes: bool | None = None) -> list[Check]:
    """``driver``: libcuda, or None. ``device_nodes``: whether the machine has device nodes of an NVIDIA GPU."""
    there = os.path.exists("/dev/nvidiactl") if device_nodes is None else device_nodes
    if driver is None:
        if there:
            fix = "run the container with the NVIDIA runtime (docker run --gpus all), or install the driver"
            return [fail("GPU", "there is a GPU, but not CUDA's driver library (libcuda.so.1)", fix)]
        if os.path.exists("/dev/kfd"):
            return [unknown("GPU", "of AMD: doctor looks at NVIDIA's only")]
        return [ok("GPU", "none of NVIDIA: engines run on CPUs")]
    if code := driver.cuInit(0):
        return [fail("GPU", f"CUDA's driver does not start (error {code})", "see nvidia-smi and dmesg")]
    count, version = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    if not count.value:
        return [fail("GPU", "CUDA's driver sees no GPU", "see CUDA_VISIBLE_DEVICES and nvidia-smi")]
    devices = [_device(driver, ordinal) for ordinal in range(count.value)]
    names = [_name(driver, device) for device in devices]
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return [ok("GPU", f"{count.value} ({', '.join(dict.fromkeys(names))}), CUDA {cuda}"), *_peers(driver, devices)]


def _peers(driver: Any, devices: list[int]) -> list[Check]:
    count = len(devices)
    if count < 2:
        return []
    without = []
    for a, b in itertools.permutations(range(count), 2):
        can = ctypes.c_int()
        if driver.cuDeviceCanAccessPeer(ctypes.byref(can), devices[a], devices[b]) or not can.value:
            without.append((a, b))
    if not without:
        return [ok("peer access", "all GPUs can read each other's memory")]
    pairs = ", ".join(f"{a} from {b}" for a, b in without[:6]) + (", ..." if len(without) > 6 else "")
    message = f"{len(without)} of {count * (count - 1)} pairs of GPUs cannot read each other's memory ({pairs}): KV "
    fix = "in virtual machines: ACS and IOMMU settings, or a topology with NVLink; see nvidia-smi topo -p2p r"
    return [warn("peer access", message + "between them goes through host memory", fix)]


def _device(driver: Any, ordinal: int) -> int:
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    return device.value


def _name(driver: Any, device: int) -> str:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    driver.cuDeviceGetName(name, _NAME_BYTES, device)
    return name.value.decode(errors="replace")
