"""``python -m vllm_kvtier.store``: serve a node's store. Requires only an engine's packages, not typer."""

import argparse
import contextlib
import logging
import logging.handlers
import os
import sys

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import LIMIT, get_logger
from vllm_kvtier.store import options as o
from vllm_kvtier.store.launcher import READY, store_path
from vllm_kvtier.store.server.server import serve
from vllm_kvtier.wire.reactor import raise_descriptor_limit

ALL_CORES = range(8192)  # more than Linux has; numbers in a container may be larger than its count of cores
LOG_BYTES = 1 << 20  # of the log file; one older file of the same size is kept


def run(path: str, options: o.StoreOptions, ready_fd: int = -1) -> int:
    """Serve until the store ends. Returns the exit status. An error is written to the log and to ``ready_fd``."""

    def send(text: bytes) -> None:
        if ready_fd < 0:
            return
        try:
            os.write(ready_fd, text)
        except BrokenPipeError:
            get_logger(__name__).info("kvtier: store: the process that started it no longer waits")
        os.close(ready_fd)

    try:
        _log_to(options)
        raise_descriptor_limit()
        serve(path, options, lambda: send(READY), launched=ready_fd >= 0)
    except (KVTierError, OSError) as error:
        get_logger(__name__).error("kvtier: %s", error)
        send(str(error).encode())
        return 1
    except Exception as error:
        get_logger(__name__).exception("kvtier: store: unexpected error")
        send(repr(error).encode())
        return 1
    return 0


def _log_to(options: o.StoreOptions) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if options.log_file:
        # Without "delay", so that a file that cannot be written is an error now.
        handler = logging.handlers.RotatingFileHandler(options.log_file, maxBytes=LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(LIMIT)
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvtier.store", description="Host memory for KV, shared by every engine of this node."
    )
    parser.add_argument("--name", default="default", help="Several stores on one node have different names.")
    parser.add_argument("--socket", default=None, help="Where to listen, whatever --name says.")
    parser.add_argument("--detach", action="store_true", help="Leave the caller's family of processes.")
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    o.add_arguments(parser)
    arguments = parser.parse_args()
    # Before any thread exists. A detached store outlives the engine, which ends its children.
    if arguments.detach:
        if os.fork():
            os._exit(0)
        # Leave the cores that the engine has bound this thread to; the kernel restricts it to the container's.
        with contextlib.suppress(OSError):  # it serves on those as well
            os.sched_setaffinity(0, ALL_CORES)
    try:
        options = o.from_namespace(arguments)
        path = arguments.socket or store_path(arguments.name)
    except KVTierError as error:
        print(f"error: {error}", file=sys.stderr)
        if arguments.ready_fd >= 0:
            os.write(arguments.ready_fd, str(error).encode())
        return 2
    return run(path, options, arguments.ready_fd)


if __name__ == "__main__":
    sys.exit(main())
