"""A Mooncake cluster: its master, the library here, and an object that is written, read and removed."""

import http.client
import importlib.metadata
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping

from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.store.launcher import package_environment, run_module
from vllm_kvtier.store.tiers.mooncake.client import INSTALL, LIBRARIES, Code, MooncakeClient
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions, reachable

_PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_TEST_BYTES = 1 << 20
_SECONDS = 20.0  # for the library, which blocks for 90 s without a master
METRICS_PORT = 9003  # the master's default
# It is reached directly, not through the proxy that the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def mooncake(
    master: str, protocol: str = "tcp", metrics_port: int = METRICS_PORT, run: Callable[..., object] = subprocess.run
) -> list[Check]:
    """``master``: as store_mooncake_master. ``run``: as subprocess.run."""
    name = f"mooncake {master}"
    given: Mapping[str, object] = {
        "mooncake_master": master, "mooncake_trusted_network": True, "mooncake_segment": "0", "mooncake_replicas": 1,
        "mooncake_host": "", "mooncake_protocol": protocol, "mooncake_devices": "",
    }  # fmt: skip
    try:
        options = MooncakeOptions.parse(given)
    except ConfigError as error:
        return [fail(name, str(error), "give --mooncake-master as store_mooncake_master")]
    installed = _installed()
    if len(installed) != 1:
        what = " and ".join(installed) or "none of its packages"
        return [fail(name, f"{what} installed; exactly one is needed", INSTALL)]
    ((package, version),) = installed.items()
    up = [address for address in options.probes if reachable(address, 3.0)]
    if not up:
        fix = "start mooncake_master there, or open the port in the firewall"
        return [fail(name, "it does not accept connections", fix)]
    checks = [_round_trip(name, given, f"{package} {version}", run)]
    if "://" not in master:
        checks.append(_segments(name, f"http://{up[0].host}:{metrics_port}"))
    if any(not address.loopback for address in options.probes):
        message = "its ports, and 12000 to 17000 of each node, have neither authentication nor encryption"
        checks.append(warn(name, message, "a firewall that lets only the nodes in; see the guide"))
    return checks


def _installed() -> dict[str, str]:
    """{package: version}. All of them have the same modules."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _round_trip(name: str, options: Mapping[str, object], library: str, run: Callable[..., object]) -> Check:
    """In a process of its own: the library blocks, logs, and crashes when it is closed."""
    command = [*run_module(__name__), json.dumps(dict(options))]
    try:
        done = run(
            command, capture_output=True, text=True, timeout=_SECONDS, cwd="/", check=False, env=package_environment()
        )
    except subprocess.TimeoutExpired:
        message = f"its client was not set up, or moved no object, within {_SECONDS:.0f} s"
        return fail(name, message, "look at the master's log, and whether a firewall closes 12000 to 17000")
    lines = str(getattr(done, "stdout", "")).splitlines()
    if not lines:
        return fail(name, f"its client ended without an answer ({library})", LIBRARIES)
    state, _, message = lines[-1].partition(" ")
    if state != "ok":
        return fail(name, f"{message} ({library})", "the same version of Mooncake on the master and on all nodes")
    return ok(name, f"{message}, with {library}")


def _segments(name: str, url: str) -> Check:
    """What the master says of its nodes."""
    try:
        with _DIRECT.open(f"{url}/get_all_segments", timeout=3.0) as answer:
            segments = answer.read(1 << 20).decode("utf-8", "replace").split()
    except (OSError, http.client.HTTPException) as error:
        fix = "mooncake_master --metrics_host and --metrics_port, and --mooncake-metrics-port here"
        return unknown(name, f"its metrics at {url} cannot be read ({error})", fix)
    if not segments:
        return warn(name, "no node gives memory", "start a store with --mooncake-master")
    return ok(name, f"{len(segments)} nodes give memory: {', '.join(segments[:8])}")


def _try(options: Mapping[str, object]) -> str:
    """Write, read and remove an object, if a node gives memory. Raises KVTierError."""
    import ctypes
    import os
    import secrets

    memory = ctypes.create_string_buffer(os.urandom(_TEST_BYTES), 2 * _TEST_BYTES)
    address = ctypes.addressof(memory)
    client = MooncakeClient(MooncakeOptions.parse(options), address, 2 * _TEST_BYTES, 0)
    keys = [f"kvtier/doctor/{secrets.token_hex(8)}"]
    began = time.monotonic()
    codes = client.put(keys, [address], [_TEST_BYTES])
    written = time.monotonic()
    if codes == [Code.NO_SPACE]:
        return "a client was set up; there is no memory for a test object"
    if codes != [0]:
        raise KVTierError(f"a test object could not be written (code {codes[0]})")
    codes = client.get(keys, [address + _TEST_BYTES], [_TEST_BYTES])
    read = time.monotonic()
    client.remove(keys)
    if codes != [_TEST_BYTES]:
        raise KVTierError(f"a test object could not be read (code {codes[0]})")
    if memory.raw[:_TEST_BYTES] != memory.raw[_TEST_BYTES:]:
        raise KVTierError("what was read is not what was written")
    return f"1 MiB was written and read in {1000 * (written - began):.0f} ms and {1000 * (read - written):.0f} ms"


if __name__ == "__main__":
    import os

    try:
        print("ok", _try(json.loads(sys.argv[1])), flush=True)
    except (KVTierError, OSError) as error:
        print("fail", error, flush=True)
    os._exit(0)  # the library's own end takes seconds
