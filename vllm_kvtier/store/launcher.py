"""Finds the node's store, and starts one if there is none."""

import fcntl
import functools
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

import vllm_kvtier
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.runtime_dir import MAX_SOCKET_PATH, make_again, other_dirs, runtime_dir
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.memory.client_mapping import shake_hands
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

READY = b"ready"
BACKOFF_SECONDS = 5.0, 60.0  # first and longest time after a failed start, which costs 0.5 s of CPU
# For an operator's service manager to start a store again that has ended, before an engine starts one: that has the
# engine's options, without the other's tiers, and takes its place.
RESTART_SECONDS = 15.0
OTHER_START_SECONDS = 5.0  # that another process's start may take beyond its timeout
MAX_LINE = 4096  # bytes of a log's last line that are shown
_LOGGED = re.compile(r"[\d-]{10} [\d:,]{12} ([A-Z]+) ")  # as the store's log has it; not what others print there
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def store_path(name: str = "default") -> str:
    """Socket path of this user's store of that name: the first of ``store_paths`` where one serves, or of all. Raises
    KVTierError as ``runtime_dir``."""
    path, *others = store_paths(name)
    if (there := [other for other in others if os.path.exists(other)]) and not serves(path):
        return next(filter(serves, there), path)
    return path


def store_paths(name: str = "default") -> list[str]:
    """Where a store of that name is looked for; one is started at the first. Raises as ``store_path``."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"store name {name!r}: 1 to 40 letters, digits, dots, dashes and underscores")
    path, *others = [str(folder / f"store-{name}.sock") for folder in (runtime_dir(), *other_dirs())]
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise KVTierError(
            f"{path} is longer than the {MAX_SOCKET_PATH} bytes of a Unix socket path; choose a shorter store name"
        )
    return [path, *others]


def start_store(path: str, options: StoreOptions, timeout: float = 30.0) -> None:
    """Start a detached store unless one listens at ``path``. Returns once it listens. Blocks: not for a reactor.

    Any number of processes may call it at once; one store is started. Raises KVTierError with the store's own message
    if it does not start. Without a log file in ``options`` the store logs next to its socket.
    """
    if serves(path):
        return
    try:
        make_again(path)
        starting = os.open(f"{path}.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (KVTierError, OSError) as error:  # the directory was removed, or is full
        raise KVTierError(f"the node store could not be started: {error}") from error
    try:
        # A holder that was stopped (docker pause, a debugger) keeps it longer than its work may take. Then this process
        # starts a store, too: one of both gets the path.
        until = time.monotonic() + timeout + OTHER_START_SECONDS
        while not lock_now(starting) and time.monotonic() < until:
            time.sleep(0.05)
        try:
            if not serves(path):
                _start(path, options, timeout)
        finally:
            fcntl.flock(starting, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
    finally:
        os.close(starting)


def lock_now(fd: int) -> bool:
    """False: another process has this file's lock. The kernel frees it when its holder ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def serves(path: str, timeout: float = 2.0) -> bool:
    """Whether a store serves there, of any version. One that hangs or refuses serves, because a second one could not
    replace it. One that closes the connection is about to end."""
    try:
        _, fd = shake_hands(path, m.Hello("launch", os.getpid(), "tool"), timeout)
    except KVTierError as error:
        return not isinstance(error.__cause__, FileNotFoundError | ConnectionError | EOFError)
    os.close(fd)
    return True


def log_path(path: str) -> str:
    """The log of a store that an engine starts at ``path``, unless its options name another."""
    return str(Path(path).with_suffix(".log"))


def last_error(path: str) -> str:
    """Why the latest store that an engine started at ``path`` ended or did not start: the last line of its log, if that
    is an error. Else ""."""
    try:
        with open(log_path(path), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - MAX_LINE))
            lines = log.read().decode("utf-8", "replace").split("\n")
    except OSError:  # none was started there, or by another user
        return ""
    last = next((line for line in reversed(lines) if line.strip()), "")
    level = _LOGGED.match(last)
    return "" if level and level[1] not in ("ERROR", "CRITICAL") else last


def _start(path: str, options: StoreOptions, timeout: float) -> None:
    log = options.log_file or log_path(path)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        command = [*run_module("vllm_kvtier.store"), "--socket", path, "--detach", f"--ready-fd={writer}"]
        with open(log, "ab") as early:  # what it prints before it logs, and what no handler sees
            first = subprocess.Popen(
                [*command, *options.arguments(), f"--log-file={log}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=early,
                cwd="/",
                env=package_environment(),
                pass_fds=[writer],
                start_new_session=True,
            )
    except OSError as error:
        os.close(reader)
        raise KVTierError(f"the node store could not be started: {error}") from error
    finally:
        os.close(writer)
    try:
        output = _read_all(reader, timeout)
    finally:
        os.close(reader)
        try:
            first.wait(1.0)
        except subprocess.TimeoutExpired:  # it has not detached
            first.kill()
            first.wait()
    if output == READY or serves(path):  # perhaps another process started one at the same time
        return
    text = output.decode("utf-8", "replace").strip() or f"no reason given; see {log}"
    raise KVTierError(f"the node store could not be started at {path}: {text}")


_SAFE = ["-P"] if sys.version_info >= (3, 11) else []  # the current folder is not in the search path

# Environment variables that name files, perhaps relative to this process's folder; children run in another one.
FILES = ("AWS_CA_BUNDLE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "GOOGLE_APPLICATION_CREDENTIALS")


# Modules that a child must find where this process does: the package's, and those of others that it may need.
_MODULES = (
    "vllm_kvtier", "msgspec", "numpy", "zmq", "vllm", "nixl", "obstore", "mooncake", "prometheus_client", "botocore"
)  # fmt: skip


def package_environment() -> dict[str, str]:
    """For ``run_module`` and ``run_code``. With it children ignore what this process ignores: under ``python -E``,
    ``-s`` or ``-I``."""
    ignored = [name for name in os.environ if sys.flags.ignore_environment and name.startswith("PYTHON")]
    kept = {name: value for name, value in os.environ.items() if name not in ignored}
    kept |= {name: os.path.abspath(os.environ[name]) for name in FILES if os.path.exists(os.environ.get(name, ""))}
    return {**kept, "PYTHONNOUSERSITE": "1"} if sys.flags.no_user_site else kept


def run_module(name: str) -> list[str]:
    """The beginning of a command that must import this very package, however this process found it. Without the current
    folder in the child's search path, from Python 3.11 on."""
    if not _search_path():
        return [sys.executable, *_SAFE, "-m", name]
    return [*run_code("import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"), name]


def run_code(code: str) -> list[str]:
    """As ``run_module``; ``code`` has ``sys``."""
    path = _search_path()
    return [sys.executable, *_SAFE, "-c", "import sys; " + (f"sys.path[:] = {path}; " if path else "") + code]


def _search_path() -> list[str]:
    """This process's, which wrappers, pex and Bazel change after its start. [] if a child finds the modules by itself.
    The standard library comes first: this process may have imported its modules before it had a folder with others of
    the same names."""
    ours = {spec.name: spec.origin for spec in filter(None, map(PathFinder.find_spec, _MODULES)) if spec.origin}
    ours["vllm_kvtier"] = vllm_kvtier.__file__
    found = _found_by_child(os.environ.get("PYTHONPATH", ""))
    if all(os.path.realpath(origin) == found.get(name) for name, origin in ours.items()):
        return []
    places = [os.path.abspath(each) for each in sys.path if os.path.exists(each) and not _is_here(each)]
    package, standard = str(Path(vllm_kvtier.__file__).resolve().parents[1]), os.path.dirname(os.__file__)
    places = [*([] if package in map(os.path.realpath, places) else [package]), *places]
    return sorted(places, key=lambda place: place not in (standard, f"{standard}/lib-dynload"))


def _is_here(folder: str) -> bool:
    try:
        return os.path.samefile(folder, ".")
    except OSError:  # a current folder that this user may not search
        return False


@functools.cache
def _found_by_child(path: str) -> dict[str, str]:
    """Files of modules that a child process with this PYTHONPATH finds."""
    ask = """import importlib.util as u, json, os, sys
specs = filter(None, map(u.find_spec, sys.argv[1:]))
print(json.dumps({spec.name: os.path.realpath(spec.origin) for spec in specs if spec.origin}))"""
    command, environment = [sys.executable, *_SAFE, "-c", ask, *_MODULES], package_environment()
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=3.0, cwd="/", env=environment).stdout
        return dict(json.loads(output.splitlines()[-1]))  # perhaps behind what others print when Python starts
    except (OSError, ValueError, TypeError, IndexError, subprocess.SubprocessError):
        return {}


def _read_all(reader: int, timeout: float) -> bytes:
    """The output of the starting store until it closes the pipe."""
    deadline, output = time.monotonic() + timeout, b""
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        more = os.read(reader, 4096)
        if not more:
            return output
        output += more
    return f"it was not ready within {timeout:g} s".encode()


class Starter:
    """``launch`` returns once a store listens, or raises KVTierError. ``done(error or "")`` is called on the reactor's
    thread, as are all methods. Where an operator ran the store, nothing is started for ``RESTART_SECONDS`` after its
    end."""

    def __init__(self, reactor: Reactor, launch: Callable[[], None], done: Callable[[str], None]):
        self._reactor, self._launch, self._done = reactor, launch, done
        self._backoff = BACKOFF_SECONDS[0]
        self._failure, self._after = "", 0.0  # why nothing is started until then
        self._operated = False  # the latest store was an operator's
        self._running = False
        self._launched = False  # by this process, and nothing has failed or connected since

    def start(self) -> str:
        """Start a store, unless one is being started or during a backoff. Returns the reason for not being
        connected."""
        if time.monotonic() < self._after:
            return self._failure
        if not self._running:
            try:
                threading.Thread(target=self._run, name="kvtier-launch", daemon=True).start()
            except RuntimeError as error:  # this process or container may have no more threads now
                self.failed(f"the node store could not be started: {error}")
                return self._failure
            self._running = self._launched = True
        return "the node store is being started"

    def failed(self, failure: str) -> None:
        """The start failed: begin the backoff."""
        self._launched = False
        self._failure, self._after = failure, time.monotonic() + self._backoff
        self._backoff = min(self._backoff * 2, BACKOFF_SECONDS[1])

    def refused(self, reason: str) -> None:
        """The store refused this process: the one that it launched is of another version, because the package here was
        replaced. The next one would be, too."""
        if self._launched:
            self.failed(reason)

    def connected(self, launched: bool) -> None:
        """A store is connected, which an engine ``launched``: end the backoff."""
        self._launched = False
        self._backoff, self._after, self._operated = BACKOFF_SECONDS[0], 0.0, not launched

    def ended(self) -> None:
        """The store has ended. Idempotent."""
        if self._operated:
            self._failure = "the node store has ended; engines start one if its operator does not"
            self._operated, self._after = False, time.monotonic() + RESTART_SECONDS

    def _run(self) -> None:
        try:
            self._launch()
            failure = ""
        except KVTierError as error:
            failure = str(error)
        except Exception as error:
            logger.exception("kvtier: unexpected error while starting the node store")
            failure = f"the node store could not be started: {error}"
        self._reactor.call_soon(lambda: self._ended(failure))

    def _ended(self, failure: str) -> None:
        self._running = False
        self._done(failure)
