"""Whether a port for an engine, a store or the proxy is free, and otherwise which process has it."""

import os
import socket
from pathlib import Path

from vllm_kvtier.doctor.engines.endpoint import parse_address
from vllm_kvtier.doctor.report import Check, fail, ok, warn
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.auth import is_loopback


def port(address: str, has_key: bool) -> Check:
    """``address``: HOST:PORT of the configuration; bound for a moment."""
    name = f"port {address}"
    try:
        host, number = parse_address(address)
    except KVTierError as error:
        return fail(name, str(error), "give --listen HOST:PORT")
    if not is_loopback(host) and not has_key:
        message = f"{host} can be reached from other machines, which needs a key shared by the cluster"
        fix = "create one with `python -m vllm_kvtier.wire.auth FILE`, set cluster_key_file, give doctor --cluster-key"
        return fail(name, message, fix)
    try:
        found = {each[0]: each[4] for each in socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)}
    except OSError as error:
        return fail(name, f"cannot listen: {error.strerror or error}", "give a name or an address of this machine")
    family = socket.AF_INET if socket.AF_INET in found else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # As ZMQ listens: sockets in TIME_WAIT do not count.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(found[family])
            sock.listen(1)
        except OSError as error:
            owner = listener(number)
            taken = f"in use by {owner}" if owner else f"cannot listen: {error.strerror or error}"
            return fail(name, taken, "choose another port, or 0 for any free one; or stop that process")
    if family is socket.AF_INET6 and ":" not in host:
        message = f"free, but {host} has only an IPv6 address: the proxy listens on such a name, an engine does not"
        return warn(name, message, f"endpoint_host: {found[family][0]}")
    return ok(name, "free")


def listener(number: int, root: str = "/proc") -> str:
    """The process that listens on a TCP port, if this user may see it: "python3 (pid 12)", or ""."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (Path(root) / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == number:
                inodes.add(f"socket:[{columns[9]}]")
    if not inodes:
        return ""
    for process in Path(root).iterdir():
        if not process.name.isdigit():
            continue
        try:
            if any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:  # another user's, or it ended
            continue
    return "a process of another user or container"
