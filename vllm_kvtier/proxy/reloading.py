"""Going on with a changed configuration file: on SIGHUP, on POST /kvtier/reload, and when a file changes.

Files are watched by the package watchfiles, where it is installed (the operating system tells, nothing polls); without
it SIGHUP remains. A configuration that cannot be used changes nothing; the log says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.app import ProxyApp
from vllm_kvtier.proxy.config_file import Settings, files_of

logger = get_logger(__name__)


class Reloader:
    """Started and stopped on the loop that serves."""

    def __init__(self, app: ProxyApp, path: str, load: Callable[[], Settings], on_settings: Callable[[Settings], None]):
        """``load`` reads the file at ``path`` and what goes with it; ``on_settings`` may raise ConfigError."""
        self._app = app
        self._path = path
        self._load = load
        self._on_settings = on_settings
        self._lock = asyncio.Lock()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._app.reload = self.reload
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._in_background)
        try:
            import watchfiles
        except ModuleNotFoundError:
            logger.info("%s is read again on SIGHUP; with the package watchfiles also when it changes.", self._path)
            return
        self._keep(self._watch(watchfiles))

    async def reload(self) -> None:
        """Read the file and apply it; raises ConfigError, and then all is as before."""
        async with self._lock:
            settings = await asyncio.to_thread(self._load)
            self._on_settings(settings)
            self._app.core.apply(settings.proxy)
            logger.info("%s was read again and is in force.", self._path)

    async def stop(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        self._stop.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _watch(self, watchfiles) -> None:
        files = files_of(self._path, await asyncio.to_thread(self._load))
        # Directories: editors and Kubernetes put another file in a file's place.
        folders = {file.resolve().parent for file in files} | {file.absolute().parent for file in files}
        names = {file.name for file in files} | {"..data"}

        def matters(change, path: str) -> bool:
            return path.rpartition("/")[2] in names

        async for _ in watchfiles.awatch(*folders, watch_filter=matters, stop_event=self._stop, recursive=False):
            await self._reload_or_say()

    async def _reload_or_say(self) -> None:
        try:
            await self.reload()
        except ConfigError as error:
            logger.error("The configuration was not read again, the old one stays: %s", error)

    def _in_background(self) -> None:
        self._keep(self._reload_or_say())

    def _keep(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
