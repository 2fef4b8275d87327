"""The bucket or directory of an object tier, tested with an object that is written, read and deleted."""

import os
import secrets
import stat
import time
from pathlib import Path

from vllm_kvtier.doctor.report import Check, fail, ok, warn
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.memory.memory_limits import format_bytes
from vllm_kvtier.store.tiers.disk.mounts import REMOTE, TABLE, mount_of
from vllm_kvtier.store.tiers.objects.object_names import CREDENTIALS, FORMAT, ObjectLocation, check_endpoint, parse_url

_TEST_BYTES = 1 << 20
_TIMEOUT, _SECONDS = 5.0, 20.0  # as the tier's


def objects(url: str, endpoint: str, region: str, size: int, mounts: Path = TABLE) -> list[Check]:
    """``size``: maximum bytes of a directory."""
    try:
        location = parse_url(url)
        check_endpoint(endpoint)
    except ConfigError as error:
        return [fail("objects", str(error), "give --object-url as store_object_url")]
    name = f"objects {location}"
    try:
        from vllm_kvtier.store.tiers.objects.object_client import ObjectClient
    except ImportError as error:
        return [fail(name, str(error), "pip install 'vllm-kvtier[object]'")]
    from vllm_kvtier.store.tiers.request_pool import Kind, Trouble

    try:
        client = ObjectClient(location, endpoint, region, _TIMEOUT, _SECONDS)
        checks = [_round_trip(name, client)]
    except Trouble as trouble:
        fixes = {Kind.DENIED: CREDENTIALS.get(location.scheme, ""), Kind.FULL: "free space there, or another place"}
        fixes[Kind.FORBIDDEN] = "allow reading, writing, deleting and listing; without writing the tier is read only"
        otherwise = "create it" if "there is no" in str(trouble) else "check the URL, --object-endpoint and the network"
        return [fail(name, str(trouble), fixes.get(trouble.kind, otherwise))]
    return [*checks, *(_directory(name, location, size, mounts) if location.scheme == "file" else ())]


def _round_trip(name: str, client) -> Check:
    """Raises Trouble."""
    from vllm_kvtier.store.tiers.request_pool import Kind, Trouble

    try:
        marker, used = client.read(client.location.marker, 2 * len(FORMAT)), "blocks of this version are there"
    except Trouble as trouble:  # a missing bucket is another kind of trouble
        if trouble.kind is not Kind.ABSENT:
            raise
        marker, used = FORMAT, "no store has used it yet"
    if marker != FORMAT:
        return fail(name, "it holds other data than blocks of this version", "use another prefix")
    key, data = f"{client.location.marker}-doctor-{secrets.token_hex(8)}", os.urandom(_TEST_BYTES)
    into = memoryview(bytearray(_TEST_BYTES))
    began = time.monotonic()
    client.put(key, memoryview(data))
    try:
        written = time.monotonic()
        client.get(key, into, written + _SECONDS)
        seconds = written - began, time.monotonic() - written
    finally:
        client.delete(key)
    if into != data:
        return fail(name, "what was read is not what was written", "do not use it: it corrupts data")
    times = " and ".join(f"{1000 * each:.0f} ms" for each in seconds)
    return ok(name, f"1 MiB was written and read in {times}; {used}")


def _directory(name: str, location: ObjectLocation, size: int, mounts: Path) -> list[Check]:
    root = Path(location.bucket)
    kind, found = mount_of(root, mounts).kind, os.statvfs(root)
    free, checks = found.f_bavail * found.f_frsize, []
    if kind not in REMOTE and not kind.startswith("fuse."):
        message = f"it is on a file system of this node only ({kind or 'unknown'}): other nodes do not see it"
        checks.append(warn(name, message, "a directory of NFS, CephFS, Lustre or the like; or --disk for a local disk"))
    if root.stat().st_mode & stat.S_IRWXO:
        message = "other users of the nodes may read or write it"
        checks.append(warn(name, message, f"chmod o-rwx {root}: KV tells what prompts were, and data may be planted"))
    if free < size:  # it may be full of blocks already
        message = f"{format_bytes(free)} are free, {format_bytes(size)} are configured"
        checks.append(warn(name, message, "a smaller store_object_size, unless blocks of other stores take the rest"))
    return checks
