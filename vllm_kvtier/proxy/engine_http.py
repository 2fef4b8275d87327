"""HTTP to one engine: a request with deadlines, its answer in pieces, and failures in words.

aiohttp, not httpx: it costs a third of the time, and half of what a proxy adds to a request is its client.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Generic, TypeVar

import aiohttp

from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.proxy.config import EngineAddress
from vllm_kvtier.proxy.deadlines import time_limit

# The engine that is asked: its str() names it in errors. Generic, because ``engines`` imports this module.
Engine = TypeVar("Engine")

# uvicorn, hence vLLM, closes idle connections after 5 s; closing them earlier here avoids most requests that meet a
# connection just closed by the other side.
_KEEPALIVE_SECONDS = 2.0
# aiohttp warns of larger bodies given as bytes.
_PLAIN_BODY_BYTES = 1 << 20
# Broken before an answer began: perhaps a kept connection that the engine had closed, perhaps a dead engine.
_BROKEN = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
# Nobody took the request: it cannot have been begun.
_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class EngineFailure(KVTierError):
    """An engine could not be reached, broke off, or did not answer in time.

    ``unreached``: no connection was made, so that the request cannot have been begun there.
    """

    def __init__(self, message: str, *, unreached: bool = False):
        super().__init__(message)
        self.unreached = unreached


class Reply(Generic[Engine]):
    """An engine's answer whose headers and first bytes are there.

    ``first`` is b"" if the body is empty. ``close`` must be called (idempotent); it drops the connection if the body
    was not read to its end, which makes the engine abort the request.
    """

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse, first: bytes):
        self.engine = engine
        self.status = response.status
        self.headers = response.headers
        self.first = first
        self._response = response

    async def chunks(self, idle_timeout: float) -> AsyncIterator[bytes]:
        """The bytes after ``first``, as they arrive; raises EngineFailure if they stop before the end."""
        read = self._response.content.readany
        while True:
            with failing_as(self.engine, f"sent nothing for {idle_timeout:g} s within an answer"):
                async with time_limit(idle_timeout):
                    data = await read()
            if not data:
                return
            yield data

    async def read(self, limit: int, timeout: float) -> bytes:
        """The whole body; raises EngineFailure if it breaks off, is late or exceeds ``limit`` bytes."""
        if self._response.content.at_eof():
            return self.first
        body = bytearray(self.first)
        with failing_as(self.engine, f"did not complete its answer within {timeout:g} s"):
            async with time_limit(timeout):
                while data := await self._response.content.readany():
                    body += data
                    if len(body) > limit:
                        raise EngineFailure(f"{self.engine} answered more than {limit} bytes.")
        return bytes(body)

    def close(self) -> None:
        self._response.close()


class EngineHttp(Generic[Engine]):
    """The connections to one engine, made when they are first needed, on the loop that needs them."""

    def __init__(self, engine: Engine, address: EngineAddress, connect_timeout: float):
        """Raises ConfigError if the address's certificates or key cannot be read."""
        self._engine = engine
        self._url = address.url
        self._tls = _tls(address)
        self._connect_timeout = connect_timeout
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def ask(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float, repeatable: bool
    ) -> Reply[Engine]:
        """Send a request; return when the answer's first bytes are there.

        Raises EngineFailure; cancelling it, like closing the reply, makes the engine abort the request.
        ``repeatable``: where a connection turns out to be broken, a fresh one may be given the request again.
        """
        with failing_as(self._engine, f"did not begin to answer within {timeout:g} s"):
            async with time_limit(timeout):
                try:
                    return await self._ask_once(method, path, body, headers)
                except _UNREACHED:
                    raise
                except _BROKEN:
                    if not repeatable:
                        raise
                    # Once more, on a fresh connection. If the engine is gone, that is refused at once.
                    return await self._ask_once(method, path, body, headers)

    async def _ask_once(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply[Engine]:
        data = io.BytesIO(body) if body is not None and len(body) > _PLAIN_BODY_BYTES else body
        response = await self._made().request(
            method, self._url + path, data=data, headers=headers, allow_redirects=False
        )
        try:
            first = await response.content.readany()
        except BaseException:
            response.close()
            raise
        return Reply(self._engine, response, first)

    def _made(self) -> aiohttp.ClientSession:
        if self._closed:
            # Chosen before it left the list, asked after.
            raise EngineFailure(f"{self._engine} is no longer used.", unreached=True)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, ssl=self._tls),
                # Answers may be large and slow; reads have deadlines of their own, which cover several reads.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Engines are named by the operator; an HTTP_PROXY of the environment is not meant for them.
                trust_env=False,
                # Uncompressed, so that the bytes can be passed on as they come.
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


def _tls(address: EngineAddress) -> ssl.SSLContext | bool:
    """How to check an https engine; True: as aiohttp does by itself. Raises ConfigError."""
    if address.ca_file is None and address.cert_file is None:
        return True
    try:
        context = ssl.create_default_context(cafile=address.ca_file)
        if address.cert_file is not None:
            context.load_cert_chain(address.cert_file, address.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"The certificates for {address.url} cannot be used ({error}); check ca_file, cert_file and key_file."
        ) from error
    return context


def certificates(address: EngineAddress) -> tuple:
    """What connections to an https engine are made with: other files, or other content, mean other connections."""
    files = (address.ca_file, address.cert_file, address.key_file)
    # A file that is not there is for `_tls` to complain of.
    return tuple((name, Path(name).stat().st_mtime_ns if Path(name).exists() else 0) for name in files if name)


def read_key(path: str, what: str) -> str:
    """A secret of one line; raises ConfigError that names the file and never the secret."""
    try:
        text = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigError(f"{what} {path} cannot be read ({reason}); check the path.") from error
    if not text or len(text.split()) != 1:
        raise ConfigError(f"{what} {path} must hold one key, without spaces, on one line.")
    return text


class failing_as:
    """A context that turns what HTTP can raise into EngineFailure, in words."""

    def __init__(self, engine: object, when_late: str):
        self._engine = engine
        self._when_late = when_late

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        # Some of aiohttp's are TimeoutErrors or OSErrors as well: the most special first.
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            raise EngineFailure(f"{self._engine} could not be reached in time.", unreached=True) from error
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
            raise EngineFailure(f"{self._engine} could not be trusted ({error}).", unreached=True) from error
        if isinstance(error, aiohttp.ClientConnectorError):
            reason = error.os_error.strerror or error
            raise EngineFailure(f"{self._engine} refused the connection ({reason}).", unreached=True) from error
        if isinstance(error, aiohttp.ClientError):
            raise EngineFailure(f"{self._engine} broke off ({type(error).__name__}: {error}).") from error
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            raise EngineFailure(f"{self._engine} {self._when_late}.") from error
        if isinstance(error, OSError):
            raise EngineFailure(f"{self._engine} broke off ({error}).") from error
