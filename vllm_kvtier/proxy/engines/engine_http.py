"""HTTP to one engine: requests with deadlines, streamed answers, and failures as ``EngineFailure``.

aiohttp takes a third of httpx's time per request, and the client is half of the proxy's overhead.
"""

import asyncio
import errno
import io
import socket
import ssl
import time
from collections.abc import AsyncIterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.proxy.config import EngineAddress
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.engines.resolver import Resolver
from vllm_kvtier.proxy.messages import sse
from vllm_kvtier.proxy.messages.buffers import BuffersFull, Held

# uvicorn, hence vLLM, closes idle connections after 5 s. Closing them earlier here avoids most requests on a connection
# that the engine has just closed.
_KEEPALIVE_SECONDS = 2.0
# aiohttp warns about larger bodies given as bytes.
_MAX_PLAIN_BODY_BYTES = 1 << 20
# The connection broke before the answer: the engine closed an idle connection, or it died.
_BROKEN_ERRORS = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
# No connection was made, so the engine cannot have started the request.
_UNREACHED_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# This process or machine may open no more; its engines are well.
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# A machine that vanishes closes no connection. The kernel asks for it after 10 s of silence, and gives up after 30 s.
_TCP_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class EngineFailure(KVTierError):
    """An engine could not be reached, closed the connection, or did not answer in time.

    ``unreached``: no connection was made, so that the engine cannot have started the request. ``lives``: it answered,
    and has not restarted. ``late``: a time limit of the proxy's for its answer has passed, and nothing else.
    ``began``: it ended its answer after the headers and before the end.
    """

    def __init__(
        self, message: str, *, unreached: bool = False, lives: bool = False, late: bool = False, began: bool = False
    ):
        super().__init__(message)
        self.unreached = unreached
        self.lives = lives
        self.late = late
        self.began = began


class AnswerTooLarge(EngineFailure):
    """An answer exceeds a limit of the proxy's memory, by what the client asked for. The engine is well."""


class AnswersFull(AnswerTooLarge):
    """An answer for which the proxy has no memory, or no descriptor, now."""


class Reply:
    """An engine's answer, after its headers and first bytes (``first``; b"" if the body is empty), of a stream without
    the comments before the first event. ``engine``: the ``proxy.engines.engine.Engine``, which imports this module.

    ``close`` must be called (idempotent). It closes the connection if the body was not read to its end, and the engine
    then aborts the request.
    """

    def __init__(self, engine: Any, response: aiohttp.ClientResponse):
        self.engine = engine
        self.status = response.status
        self.headers = response.headers
        self.first = b""
        self.is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        self._comments = sse.Comments()
        self._response = response

    async def begin(self) -> None:
        """Read ``first``."""
        while not self.first and (data := await self._response.content.readany()):
            self.first = self._comments.skip(data) if self.is_stream else data

    async def chunks(self, idle_timeout: float) -> AsyncIterator[bytes]:
        """The bytes after ``first``, as they arrive. Raises EngineFailure if they stop before the end, or are nothing
        but comments for ``idle_timeout``."""
        read = self._response.content.readany
        left = idle_timeout
        while True:
            began = time.monotonic()
            with engine_errors(self.engine, f"sent nothing for {idle_timeout:g} s within an answer"):
                async with time_limit(left):
                    data = await read()
            if not data:
                return
            silent = self.is_stream and not self._comments.skip(data)
            left = max(0.0, left - (time.monotonic() - began)) if silent else idle_timeout
            yield data

    async def read(self, limit: int, timeout: float, held: Held | None = None) -> bytes:
        """The whole body, counted by ``held``. Raises EngineFailure if it is incomplete or late, AnswerTooLarge if it
        is longer than ``limit`` bytes, and AnswersFull."""
        body = bytearray(self.first)
        with engine_errors(self.engine, f"did not complete its answer within {timeout:g} s"):
            async with time_limit(timeout):
                while True:
                    if len(body) > limit:
                        raise AnswerTooLarge(f"{self.engine} answered more than {limit} bytes.")
                    if held is not None:
                        self.hold(held, len(body))
                    if self._response.content.at_eof():
                        return bytes(body)
                    body += await self._response.content.readany()

    def hold(self, held: Held, nbytes: int) -> None:
        """Raises AnswersFull."""
        try:
            held.resize(nbytes)
        except BuffersFull as error:
            raise AnswersFull(f"An answer of {self.engine} ended early: {error}.") from error

    def close(self) -> None:
        self._response.close()


class EngineHttp:
    """The connections to one engine, opened on first use on the loop that uses them."""

    def __init__(self, engine: Any, url: str, connect_timeout: float, tls: ssl.SSLContext | bool = True):
        """``connect_timeout`` and ``tls`` may be changed: all further requests open or share connections of these."""
        self.connect_timeout = connect_timeout
        self.tls = tls
        self._engine = engine
        self._url = url
        self._session: aiohttp.ClientSession | None = None
        self._resolver = Resolver(lambda: self.connect_timeout)
        self._closed = False

    async def ask(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float, repeatable: bool
    ) -> Reply:
        """Send a request; return at the first bytes of the answer.

        Raises EngineFailure. Cancelling it, like closing the reply, makes the engine abort the request.
        ``repeatable``: after a broken connection, send the request again on a new one.
        """
        with engine_errors(self._engine, f"did not begin to answer within {timeout:g} s"):
            async with time_limit(timeout):
                try:
                    return await self._ask_once(method, path, body, headers)
                except _UNREACHED_ERRORS:
                    raise
                except _BROKEN_ERRORS as broken:
                    if not repeatable:
                        raise
                    try:
                        # If the engine is gone, it refuses the new connection at once.
                        return await self._ask_once(method, path, body, headers)
                    except _UNREACHED_ERRORS as error:
                        raise broken from error  # it may have started the request before

    async def _ask_once(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        data = io.BytesIO(body) if body is not None and len(body) > _MAX_PLAIN_BODY_BYTES else body
        response = await self._connected().request(
            method, self._url + path, data=data, headers=headers, allow_redirects=False, ssl=self.tls,
            # No total timeout: answers may be large and slow, and their reads have deadlines.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.connect_timeout),
        )  # fmt: skip
        reply = Reply(self._engine, response)
        try:
            await reply.begin()
        except BaseException:
            reply.close()
            raise
        return reply

    def _connected(self) -> aiohttp.ClientSession:
        if self._closed:
            # The engine was chosen before it left the list.
            raise EngineFailure(f"{self._engine} is no longer used.", unreached=True)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    keepalive_timeout=_KEEPALIVE_SECONDS,
                    socket_factory=_socket,
                    resolver=self._resolver,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                # An HTTP_PROXY of the environment is not meant for engines that the operator names.
                trust_env=False,
                # Uncompressed, so that the bytes can be forwarded unchanged.
                headers={"accept-encoding": "identity"},
                auto_decompress=False,
                skip_auto_headers=("user-agent", "accept", "content-type"),
            )
        return self._session

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None
        await self._resolver.close()


def _socket(address: tuple) -> socket.socket:
    """For a connection to ``address``, an item of what ``getaddrinfo`` returns."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_KEEPALIVE.items():
        if hasattr(socket, name):  # on Linux all
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


@lru_cache(maxsize=32)  # those of earlier certificates stay as long
def _tls_context(ca: str | None, cert: str | None, key: str | None, files: tuple) -> ssl.SSLContext:
    """``files``: as of ``Secrets``. To read a file of all authorities takes 30 ms and more, and a reload asks for each
    engine."""
    context = ssl.create_default_context(cafile=ca)
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context


def _tls(address: EngineAddress, files: tuple) -> ssl.SSLContext | bool:
    """The TLS context for an https engine; True: aiohttp's default. Raises ConfigError."""
    if address.ca_file is None and address.cert_file is None:
        return True
    try:
        return _tls_context(address.ca_file, address.cert_file, address.key_file, files)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"The certificates for {address.url} cannot be used ({error}); check ca_file, cert_file and key_file."
        ) from error


class Secrets(NamedTuple):
    """An engine's key and certificates, read once. ``files``: the certificates' names and times."""

    key: str | None = None
    tls: ssl.SSLContext | bool = True
    files: tuple = ()

    @classmethod
    def read(cls, address: EngineAddress) -> "Secrets":
        """Raises ConfigError."""
        name, files = address.api_key_file, _certificates(address)
        key = None if name is None else read_key(name, f"The API key for {address.url}")
        return cls(key, _tls(address, files), files)


def _certificates(address: EngineAddress) -> tuple:
    """(name, time) of each file."""

    def changed(name: str) -> int:
        try:
            return Path(name).stat().st_mtime_ns
        except OSError:  # `_tls` reports it
            return 0

    return tuple((name, changed(name)) for name in (address.ca_file, address.cert_file, address.key_file) if name)


def read_key(path: str, what: str) -> str:
    """A secret of one line. Raises ConfigError, which names the file and never the secret."""
    try:
        text = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigError(f"{what} {path} cannot be read ({reason}); check the path.") from error
    if not text or len(text.split()) != 1:
        raise ConfigError(f"{what} {path} must contain one key, without spaces, on one line.")
    return text


class engine_errors:
    """A context that turns the errors of HTTP into EngineFailure."""

    def __init__(self, engine: object, when_late: str):
        self._engine = engine
        self._when_late = when_late

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        # Some of aiohttp's errors are TimeoutErrors or OSErrors too, so the most specific are tested first.
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            raise EngineFailure(f"{self._engine} could not be reached in time.", unreached=True) from error
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
            raise EngineFailure(f"{self._engine} could not be trusted ({error}).", unreached=True) from error
        if isinstance(error, aiohttp.ClientConnectorError):
            reason = error.os_error.strerror or error
            if error.os_error.errno in _OWN_LIMITS:
                raise AnswersFull(f"{self._engine} cannot be reached: {reason}", unreached=True) from error
            raise EngineFailure(f"{self._engine} refused the connection ({reason}).", unreached=True) from error
        if isinstance(error, aiohttp.ClientError):
            began = isinstance(error, aiohttp.ClientPayloadError)
            raise EngineFailure(f"{self._engine} broke off ({type(error).__name__}: {error}).", began=began) from error
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            raise EngineFailure(f"{self._engine} {self._when_late}.", late=True) from error
        if isinstance(error, OSError):
            raise EngineFailure(f"{self._engine} broke off ({error}).") from error
