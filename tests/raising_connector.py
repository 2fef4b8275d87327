"""A connector whose functions can be made to raise, once, on vLLM's thread; for engines of tests.

    "kv_connector": "RaisingConnector", "kv_connector_module_path": "raising_connector"

The environment names a Unix socket (``KVTIER_RAISING``) on which the engine answers a line of JSON with another:

    {"do": "record"}                    from now on remember which functions run on vLLM's thread
    {"do": "recorded"}                  their names; and stop
    {"do": "arm", "name": N, "skip": K}   the function raises at its next call but K
    {"do": "disarm"}                    {"fired": how often it raised, "errors": what was contained, by place}

With ``uni`` as executor the scheduler connector and the worker connector run on one thread. A profile function sees
each call on it, and its exceptions are raised in the called function. ``containment`` is left out, because it catches;
so are the wrappers of vLLM's methods, which call vLLM's method and contained functions only.
"""

import inspect
import json
import logging
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from raising_names import LEFT_OUT, VARIABLE

import vllm_kvtier
from vllm_kvtier import containment, logs
from vllm_kvtier.connector import KVTierConnector

ROOT = str(Path(vllm_kvtier.__file__).parent) + os.sep


class Raised(Exception):
    """On purpose."""


class Switch:
    """What the profile function is to do. Written by the control thread, read on vLLM's."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}  # by code object; "" if it is not ours or left out
        self.recording: set[str] | None = None
        self.armed, self.skip, self.fired = "", 0, 0
        self.errors: Counter[str] = Counter()
        self.logged = 0  # tracebacks of what was raised on purpose
        self.containments: list[containment.Containment] = []

    def name(self, code: Any) -> str:
        found = self.names.get(code)
        if found is None:
            path = code.co_filename
            where = f"{path[len(ROOT) :]}:{code.co_qualname}" if path.startswith(ROOT) else ""
            left_out = where in LEFT_OUT or where.partition(":")[0] in LEFT_OUT
            found = self.names[code] = "" if left_out else where
        return found

    def profile(self, frame: Any, event: str, arg: Any) -> None:
        if event != "call":
            return
        name = self.name(frame.f_code)
        if not name:
            return
        if self.recording is not None:
            self.recording.add(name)
        if name == self.armed:
            if self.skip:
                self.skip -= 1
                return
            self.armed, self.fired = "", self.fired + 1
            raise Raised(f"Raised in {name}")

    def watch(self) -> None:
        """On vLLM's thread: a profile function that has raised is gone."""
        wanted = self.profile if self.recording is not None or self.armed else None
        if sys.getprofile() is not wanted:
            sys.setprofile(wanted)

    def answer(self, asked: dict[str, Any]) -> Any:
        match asked["do"]:
            case "record":
                self.recording = set()
                return True
            case "recorded":
                recorded, self.recording = sorted(self.recording), None
                return recorded
            case "arm":
                for each in self.containments:
                    each.recent.clear()  # so many in a row are this test's
                logs.LIMIT.clear()  # so are so many lines of one place
                self.errors.clear()
                self.logged = 0
                self.fired, self.skip, self.armed = 0, asked["skip"], asked["name"]
                return True
            case "disarm":
                self.armed = ""
                return {"fired": self.fired, "errors": dict(self.errors), "logged": self.logged}
        raise ValueError(asked)

    def serve(self, path: str) -> None:
        server = socket.socket(socket.AF_UNIX)
        Path(path).unlink(missing_ok=True)
        server.bind(path)
        server.listen()
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rw") as file:
                for line in file:
                    file.write(json.dumps(self.answer(json.loads(line))) + "\n")
                    file.flush()


switch = Switch()


class Counted(containment.Containment):
    def failed(self, where: str) -> None:
        switch.errors[where] += 1
        super().failed(where)
        switch.watch()  # the step goes on


class Heard(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        switch.logged += "Raised" in record.getMessage() or bool(record.exc_info and record.exc_info[0] is Raised)


class RaisingConnector(KVTierConnector):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.containment.__class__ = Counted
        switch.containments.append(self.containment)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        logging.getLogger("vllm").addHandler(Heard())
        threading.Thread(target=switch.serve, args=(os.environ[VARIABLE],), daemon=True).start()


def _watched(name: str, method: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        switch.watch()
        return method(self, *args, **kwargs)

    call.__name__ = name
    return call


for _name, _method in inspect.getmembers(KVTierConnector, inspect.isfunction):
    if _name in vars(KVTierConnector) and _name not in ("__init__", "bind_gpu_block_pool") and _name[0] != "_":
        setattr(RaisingConnector, _name, _watched(_name, _method))
