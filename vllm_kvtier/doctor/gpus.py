"""GPUs, as the driver tells of them without a context: nothing is allocated on a device that an engine uses."""

import ctypes
import itertools
import os
from typing import Any

from vllm_kvtier.doctor.report import Check, fail, ok, warn

_NAME = 128


def load_driver() -> Any | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def gpus(driver: Any | None, device_nodes: bool | None = None) -> list[Check]:
    """``driver``: libcuda, None where there is none. ``device_nodes``: whether the machine shows an NVIDIA GPU."""
    there = os.path.exists("/dev/nvidiactl") if device_nodes is None else device_nodes
    if driver is None:
        if there:
            remedy = "run the container with the NVIDIA runtime (docker run --gpus all), or install the driver"
            return [fail("GPU", "a GPU is here, but CUDA's driver library (libcuda.so.1) is not", remedy)]
        return [ok("GPU", "none here: engines run on CPUs")]
    if code := driver.cuInit(0):
        return [fail("GPU", f"CUDA's driver does not start (error {code})", "look at nvidia-smi, and at dmesg")]
    count, version = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    if not count.value:
        return [fail("GPU", "CUDA's driver sees no GPU", "look at CUDA_VISIBLE_DEVICES and at nvidia-smi")]
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
        return [ok("peer access", "every GPU can read every other one's memory")]
    pairs = ", ".join(f"{a} from {b}" for a, b in without[:6]) + (", ..." if len(without) > 6 else "")
    return [
        warn(
            "peer access",
            f"{len(without)} of {count * (count - 1)} pairs of GPUs cannot read each other's memory ({pairs}): between "
            "those KV goes through host memory",
            "in virtual machines: ACS and IOMMU settings, or a topology with NVLink; see nvidia-smi topo -p2p r",
        )
    ]


def _device(driver: Any, ordinal: int) -> int:
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    return device.value


def _name(driver: Any, device: int) -> str:
    name = ctypes.create_string_buffer(_NAME)
    driver.cuDeviceGetName(name, _NAME, device)
    return name.value.decode(errors="replace")
