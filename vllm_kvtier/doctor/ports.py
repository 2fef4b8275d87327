"""A port that an engine, a store or a router is to listen on: whether it is free, and who has it."""

import os
import socket
from pathlib import Path

from vllm_kvtier.doctor.endpoint import parse_address
from vllm_kvtier.doctor.report import Check, fail, ok
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.auth import is_loopback


def port(address: str, has_key: bool) -> Check:
    """``address``: HOST:PORT as it is to be configured; bound for a moment, and given back."""
    name = f"port {address}"
    try:
        host, number = parse_address(address)
    except KVTierError as error:
        return fail(name, str(error), "give --listen HOST:PORT")
    if not is_loopback(host) and not has_key:
        return fail(
            name,
            f"{host} is reached from other machines, which needs a key shared by the cluster",
            "make one with `python -m vllm_kvtier.wire.auth FILE`, set cluster_key_file, give doctor --cluster-key",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # As ZMQ listens: what only waits for its last packets is no reason to refuse.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, number))
            sock.listen(1)
        except OSError as error:
            owner = listener(number)
            taken = f"it is taken by {owner}" if owner else f"it cannot be listened on: {error.strerror or error}"
            return fail(name, taken, "choose another port, or 0 for any free one; or end that process")
    return ok(name, "free")


def listener(number: int, root: str = "/proc") -> str:
    """Who listens on a TCP port, as far as this user may see: "python3 (pid 12)", "another user's process" or ""."""
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
