"""The proxy's process: uvicorn with TLS, reloading, and a shutdown that completes requests under way."""

import asyncio
import math
import signal
import ssl
from collections.abc import Callable
from functools import partial

import uvicorn

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy import logs
from vllm_kvtier.proxy.app import ProxyApp, create_app
from vllm_kvtier.proxy.config_file import Settings
from vllm_kvtier.proxy.core import check_secrets
from vllm_kvtier.proxy.reloading import Reloader
from vllm_kvtier.proxy.routes.connections import BoundedProtocol
from vllm_kvtier.wire.reactor import raise_descriptor_limit

logger = get_logger(__name__)


class Server(uvicorn.Server):
    """uvicorn's server. On SIGTERM or Ctrl-C, /ready answers 503 for ``drain_delay`` seconds before it shuts down.

    A second signal skips that delay. A third skips the wait for requests under way.
    """

    def __init__(self, config: uvicorn.Config, app: ProxyApp, drain_delay: float):
        super().__init__(config)
        self.reloader: Reloader | None = None
        self._app = app
        self._drain_delay = drain_delay

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.reloader is not None and self.started:
            self.reloader.start()

    async def shutdown(self, sockets=None) -> None:
        if self.reloader is not None:
            await self.reloader.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame) -> None:
        core = self._app.core
        if core is None or core.draining or self._drain_delay <= 0 or self.should_exit:
            if core is not None:
                core.draining = True
            super().handle_exit(sig, frame)
            return
        core.draining = True
        logger.info("kvtier: proxy: shutdown in %g s; /ready answers 503 until then", self._drain_delay)
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(loop.call_later, self._drain_delay, super().handle_exit, sig, frame)


def serve(path: str | None, load: Callable[[], Settings], warn: Callable[[Settings], None]) -> None:
    """Serve until a signal. ``path``: the configuration file, if any, which ``load`` reads, with the command's options.
    ``warn``: of what may be wrong with the settings that are in force now.

    Raises ConfigError before anything listens if a key, a certificate or a secret cannot be used.
    """
    settings = load()
    check_secrets(settings.proxy)
    raise_descriptor_limit()
    logs.install(settings.server.log_level)
    options = settings.server
    warn(settings)
    app = create_app(settings.proxy)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        # A caller of /kvtier/drain must not choose the address that it seems to come from.
        proxy_headers=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(options.drain_timeout),
        ssl_certfile=options.tls_cert_file,
        ssl_keyfile=options.tls_key_file,
        ssl_ca_certs=options.tls_client_ca_file,
        ssl_cert_reqs=ssl.CERT_NONE if options.tls_client_ca_file is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"The certificate cannot be used ({error}); check tls_cert_file and tls_key_file.") from error
    server = Server(config, app, options.drain_delay)
    if path is not None:
        reload_certificate = partial(_reload_certificate, config, options)
        server.reloader = Reloader(app, path, settings, load, reload_certificate, warn)
    # Until the reloader runs, or without a file, there is nothing to reload; the default action would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server.run()


def _reload_certificate(config: uvicorn.Config, old, new) -> None:
    """Use the new content of the same certificate files for new connections."""
    if new != old:
        logger.warning(
            "kvtier: proxy: server options (host, port, tls_*, drain_*, log_level) changed; "
            "restart the proxy to apply them"
        )
    if config.ssl is not None:
        try:
            # Checked first in another context: with a key that does not match, load_cert_chain keeps the certificate.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(old.tls_cert_file, old.tls_key_file)
            config.ssl.load_cert_chain(old.tls_cert_file, old.tls_key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"The certificate {old.tls_cert_file} cannot be used ({error}).") from error
