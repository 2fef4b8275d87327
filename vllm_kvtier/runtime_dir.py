"""This user's directory of Unix sockets on this node. Its mode is 0700: only this user can connect to them.

All processes of an engine derive a socket's path by themselves, each from its own environment: no name in it is random.
"""

import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Container
from pathlib import Path

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)

MAX_SOCKET_PATH = 107  # bytes
USUAL = "/run/user/{uid}", "/tmp"  # of logins; of services, cron and containers, which have no XDG_RUNTIME_DIR


def runtime_dir() -> Path:
    """``kvtier-UID`` in XDG_RUNTIME_DIR; where that is not set, or unusable, in the directory of temporary files.

    Raises KVTierError, with the paths and what is wrong with each, if neither can be used.
    """
    runtime, wrong = os.environ.get("XDG_RUNTIME_DIR", ""), []
    for base in [runtime] if os.path.isdir(runtime) else []:  # containers often name one that does not exist
        folder = _in(base)
        if not (reason := _make(folder)):
            return folder
        wrong.append(reason)
    try:
        folder = _in(_temporary() or tempfile.gettempdir())
        reason = _make(folder)
    except FileNotFoundError as error:  # no directory of temporary files can be written to
        reason = str(error)
    if reason:
        raise KVTierError("; ".join([*wrong, reason]))
    for each in wrong:
        _warn(each, folder)
    return folder


def make_again(path: str) -> None:
    """Make the directory of this socket, which ``runtime_dir`` made, if it is gone: systemd removes XDG_RUNTIME_DIR
    with a user's last logout, and makes another one at the next login. Raises KVTierError if it cannot be made, or if
    one that is there is another user's. Its mode is the user's choice: it may be of a volume."""
    folder = Path(path).parent
    if folder.name != _in("").name:
        return
    try:
        reason = distrust(folder.lstat(), {os.getuid(), 0})
    except FileNotFoundError:
        reason = _make(folder)
    if reason:
        raise KVTierError(f"{folder} cannot be used: {reason}")


def other_dirs() -> list[Path]:
    """Where this user's processes of another environment have their sockets, if ``runtime_dir`` is at a usual place. A
    process with one of its own is kept apart on purpose."""
    ours, usual = runtime_dir(), [_in(base.format(uid=os.getuid())) for base in USUAL]
    return [folder for folder in usual if folder != ours and not _wrong(folder)] if ours in usual else []


def private_path(identity: str, suffix: str = ".sock") -> str:
    """Path of a socket that only this user can open. Raises KVTierError as ``runtime_dir``, or if it is too long."""
    # A Unix socket path is short: the identity is hashed.
    path = str(runtime_dir() / f"{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}{suffix}")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise KVTierError(
            f"{path} is longer than the {MAX_SOCKET_PATH} bytes of a Unix socket path; set XDG_RUNTIME_DIR to a "
            "shorter directory"
        )
    return path


def distrust(info: os.stat_result, owners: Container[int]) -> str:
    """Why it is not used; "" if nothing is wrong. ``info``: of ``lstat``, or of an open file. ``owners``: users that
    it may belong to."""
    if info.st_uid in owners:
        return ""
    if stat.S_ISLNK(info.st_mode):
        return f"it is a link of user {info.st_uid}"
    return f"it belongs to user {info.st_uid}, and this process is of user {os.geteuid()}"


def _in(base: str) -> Path:
    return Path(base) / f"kvtier-{os.getuid()}"


def _temporary() -> str | None:
    """As tempfile, which passes over a full directory; sockets need no space."""
    named = (os.environ.get("TMPDIR"), os.environ.get("TEMP"), os.environ.get("TMP"), "/tmp")
    usable = (base for base in named if base and os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK))
    return next(map(os.path.abspath, usable), None)


def _make(folder: Path) -> str:
    """Make it if it does not exist. Returns why it cannot be used; "" if it can."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return _wrong(folder)


def _wrong(folder: Path) -> str:
    try:
        info = folder.lstat()
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"
    if not stat.S_ISDIR(info.st_mode) or info.st_mode & 0o077 or distrust(info, {os.getuid()}):
        return f"{folder} must be a directory of mode 0700 owned by this user; remove it or fix it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


@functools.cache
def _warn(reason: str, used: Path) -> None:
    """Once."""
    logger.warning("kvtier: %s: the sockets of this process are in %s", reason, used)
