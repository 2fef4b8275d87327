"""Finding the node's store, and starting one where there is none."""

import fcntl
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import vllm_kvtier
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.mapping import shake_hands
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.wire.link import MAX_SOCKET_PATH, link_path

READY = b"ready"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def store_path(name: str = "default") -> str:
    """Socket path of this user's store of that name. Raises KVTierError if its directory is not ours alone."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"store name {name!r}: 1 to 40 letters, digits, dots, dashes and underscores")
    path = str(Path(link_path("store", name)).with_name(f"store-{name}.sock"))
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise KVTierError(
            f"{path} is longer than the {MAX_SOCKET_PATH} bytes of a Unix socket path; choose a shorter store name"
        )
    return path


def start_store(path: str, options: StoreOptions, timeout: float = 30.0) -> None:
    """Return once a store listens at ``path``; starts a detached one if nobody does. Blocks: not for a reactor.

    Any number of processes may call it at once: one store is started. Raises KVTierError, with the store's own
    words, if it does not come up. Where ``options`` name no log file, the store logs next to its socket.
    """
    if serves(path):
        return
    # Held by whoever starts a store, and by the kernel's doing only as long as it lives. What the holder does is
    # bounded by its timeout, so waiting for it needs none.
    starting = os.open(f"{path}.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if not serves(path):
            _start(path, options, timeout)
    finally:
        os.close(starting)


def serves(path: str, timeout: float = 2.0) -> bool:
    """Does a store serve there, of whatever version? One that hangs or refuses serves: a second could not take over.
    One that hangs up without a word is about to end."""
    try:
        _, fd = shake_hands(path, m.Hello("launch", os.getpid(), "tool"), timeout)
    except KVTierError as error:
        return not isinstance(error.__cause__, FileNotFoundError | ConnectionError | EOFError)
    os.close(fd)
    return True


def _start(path: str, options: StoreOptions, timeout: float) -> None:
    log = options.log_file or str(Path(path).with_suffix(".log"))
    told, tell = os.pipe2(os.O_CLOEXEC)
    try:
        command = [sys.executable, "-m", "vllm_kvtier.store", "--socket", path, "--detach", f"--ready-fd={tell}"]
        # The store must find this very package, however this process found it.
        package = str(Path(vllm_kvtier.__file__).resolve().parents[1])
        search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        first = subprocess.Popen(
            [*command, *options.arguments(), f"--log-file={log}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "PYTHONPATH": search},
            pass_fds=[tell],
            start_new_session=True,
        )
    except OSError as error:
        os.close(told)
        raise KVTierError(f"the node store could not be started: {error}") from error
    finally:
        os.close(tell)
    try:
        story = _listen_to(told, timeout)
    finally:
        os.close(told)
        try:
            first.wait(1.0)
        except subprocess.TimeoutExpired:  # it has not even got as far as leaving this process's family
            first.kill()
            first.wait()
    if story == READY or serves(path):  # somebody else's, perhaps: started by hand at the same moment
        return
    words = story.decode("utf-8", "replace").strip() or f"it did not say why; see {log}"
    raise KVTierError(f"the node store could not be started at {path}: {words}")


def _listen_to(told: int, timeout: float) -> bytes:
    """What the starting store says until it closes its end."""
    deadline, story = time.monotonic() + timeout, b""
    poller = select.poll()
    poller.register(told, select.POLLIN)
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        more = os.read(told, 4096)
        if not more:
            return story
        story += more
    return f"it was not ready within {timeout:g} s".encode()
