"""Reload the configuration file on SIGHUP, on POST /kvtier/reload, and when a file changes.

The package watchfiles, if installed, watches the files without polling. An invalid configuration changes nothing and is
logged.
"""

import asyncio
import signal
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.app import ProxyApp
from vllm_kvtier.proxy.config_file import ServerOptions, Settings, watched_files

logger = get_logger(__name__)


class Reloader:
    """Reloads the configuration. Started and stopped on the serving event loop."""

    def __init__(
        self,
        app: ProxyApp,
        path: str,
        settings: Settings,
        load: Callable[[], Settings],
        reload_certificate: Callable[[ServerOptions], None],
        warn: Callable[[Settings], None],
    ):
        """``settings``: in force now. ``load`` reads the file at ``path`` and the command's options, and
        ``reload_certificate`` gets the server's; it may raise ConfigError."""
        self._app = app
        self._path = path
        self._settings = settings
        self._load = load
        self._reload_certificate = reload_certificate
        self._warn = warn
        self._lock = asyncio.Lock()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._app.reload = self.reload
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._in_background)
        try:
            import watchfiles
        except ModuleNotFoundError:
            logger.info(
                "kvtier: proxy: %s is reloaded on SIGHUP only; install watchfiles to reload it on change", self._path
            )
            return
        self._keep(self._watch(watchfiles))

    async def reload(self) -> None:
        """Read the file and apply it. Raises ConfigError, and then changes nothing."""
        async with self._lock:
            settings = await asyncio.to_thread(self._load)
            self._reload_certificate(settings.server)
            self._app.core.apply(settings.proxy)
            # The server's stay those of the start.
            self._settings = Settings(self._settings.server, settings.proxy)
            self._warn(self._settings)
            logger.info("kvtier: proxy: configuration %s reloaded", self._path)

    async def stop(self) -> None:
        # It ignores the signal: the default action would break off answers to which the proxy gives time to end.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
        self._stop.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _watch(self, watchfiles) -> None:
        try:
            while not self._stop.is_set():
                await self._watch_files(watchfiles, watched_files(self._path, self._settings))
        except Exception:  # such as of a machine without inotify watches left
            logger.exception("kvtier: proxy: %s is not watched any more; it is reloaded on SIGHUP only", self._path)

    async def _watch_files(self, watchfiles, files: set[Path]) -> None:
        """Reload when one of ``files`` changes, until they are others, or ``stop``."""
        # Directories, because editors and Kubernetes replace the file.
        folders = {file.resolve().parent for file in files} | {file.absolute().parent for file in files}
        names = {file.name for file in files} | {"..data"}

        def matters(change, path: str) -> bool:
            return path.rpartition("/")[2] in names

        watch = watchfiles.awatch(*folders, watch_filter=matters, stop_event=self._stop, recursive=False)
        async with aclosing(watch) as changes:
            async for _ in changes:
                await self._reload_or_log()
                if watched_files(self._path, self._settings) != files:
                    return

    async def _reload_or_log(self) -> None:
        try:
            await self.reload()
        except ConfigError as error:
            # No traceback: the error is the file's.
            logger.error(  # noqa: TRY400
                "kvtier: proxy: reload failed (%s); the old configuration stays in force", error
            )
        except Exception:
            logger.exception("kvtier: proxy: reload failed; the old configuration stays in force")

    def _in_background(self) -> None:
        self._keep(self._reload_or_log())

    def _keep(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
