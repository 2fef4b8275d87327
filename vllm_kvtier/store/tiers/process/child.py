"""A tier process as a child of the server. Nothing here blocks."""

import errno
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from vllm_kvtier.store import linux
from vllm_kvtier.store.launcher import package_environment, run_module

MAX_LINE = 1000  # characters of a line of its stderr that are logged
MAX_LINES = 500  # of its stderr that are logged


class Child:
    """``ended``: a descriptor that is readable when the process and its I/O have ended. ``stderr``: a non-blocking
    descriptor. ``silent``: its stderr is at the end. ``last_line``: of its stderr."""

    def __init__(self, process: subprocess.Popen[bytes]):
        assert process.stderr is not None
        self._process, self._stderr = process, process.stderr
        self.pid = process.pid
        self.ended = _end_of(process.pid)
        self.stderr = self._stderr.fileno()
        os.set_blocking(self.stderr, False)
        self.silent, self.last_line = False, ""
        self._rest, self._lines = b"", 0

    def kill(self) -> None:
        """Send SIGKILL. Idempotent, also after its end: until it is reaped no other process has its number."""
        self._process.kill()

    def reap(self) -> int | None:
        """Its exit status; below 0: minus the signal that ended it; None: it runs."""
        return self._process.poll()

    def read_lines(self) -> list[str]:
        """New lines of its stderr, at most MAX_LINES in all."""
        while not self.silent:
            try:
                data = os.read(self.stderr, 1 << 16)
            except BlockingIOError:
                break
            self.silent = not data
            self._rest += data
            if len(self._rest) > 1 << 20:  # bounds the time in which a flood of lines blocks the reactor
                break
        *whole, self._rest = self._rest.split(b"\n")
        if self.silent or len(self._rest) > 1 << 16:
            whole, self._rest = [*whole, self._rest], b""
        lines = [text for line in whole if (text := line.decode("utf-8", "replace").strip()[:MAX_LINE])]
        if lines:
            self.last_line = lines[-1]
        before, self._lines = self._lines, self._lines + len(lines)
        return lines[: max(0, MAX_LINES - before)]

    def close(self) -> None:
        """Close the descriptors. To be called once, when it is reaped or abandoned."""
        os.close(self.ended)
        self._stderr.close()


def spawn_tier_process(kind: str, sock: socket.socket, pool_fd: int, pool_bytes: int) -> Child:
    """Start a tier process with this end of a socketpair; the caller closes ``sock``. Raises OSError."""
    command = [*run_module("vllm_kvtier.store.tiers.process.main"), f"--kind={kind}"]
    arguments = [f"--socket={sock.fileno()}", f"--pool={pool_fd}", f"--bytes={pool_bytes}"]
    return spawn([*command, *arguments], (sock.fileno(), pool_fd))


def spawn(command: Sequence[str], fds: Sequence[int]) -> Child:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env=package_environment(),
        pass_fds=fds,
        start_new_session=True,  # Ctrl-C is for the server
    )
    try:
        return Child(process)
    except BaseException:
        process.kill()
        raise


def _end_of(pid: int) -> int:
    """A descriptor that is readable when this child has ended. It is not reaped."""
    try:
        return linux.pidfd_open(pid)
    except OSError:  # Linux before 5.3, or a sandbox
        reader, writer = os.pipe()
        thread = threading.Thread(target=_close_at_end, args=(pid, writer), name=f"kvtier-child-{pid}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of processes
            os.close(reader)
            os.close(writer)
            raise OSError(errno.EAGAIN, str(error)) from error
        return reader


def _close_at_end(pid: int, fd: int) -> None:
    with suppress(ChildProcessError):  # reaped already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.close(fd)
