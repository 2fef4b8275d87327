"""The configuration file (YAML, JSON or TOML): the engines and every option of the proxy and of its server.

    engines:
      - {role: prefill, url: http://10.0.0.1:8100, weight: 2}
      - {role: decode, url: https://10.0.0.2:8200, ca_file: engines.pem, api_key_file: engine.key, max_requests: 256}
    port: 8000
    queue_limit: 500

Paths are relative to the file. docs/proxy.md lists all options.
"""

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.config import RENAMED, ROLES, EngineAddress, ProxyConfig, kv_address
from vllm_kvtier.renamed import with_new_names


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the proxy listens. A change needs a restart, except for the content of the certificate."""

    #: Address to listen on.
    host: str = "127.0.0.1"
    #: Port to listen on.
    port: int = 8000
    #: Certificate (PEM, with intermediate certificates); with tls_key_file the proxy serves https.
    tls_cert_file: str | None = None
    #: Key of the certificate.
    tls_key_file: str | None = None
    #: Certificate authorities (PEM); clients must have certificates signed by them.
    tls_client_ca_file: str | None = None
    #: debug, info, warning or error.
    log_level: str = "info"
    #: Time after SIGTERM in which /ready answers 503 before connections are refused, for load balancers.
    drain_delay: float = 0.0
    #: Time after that for requests under way to end.
    drain_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level is {self.log_level!r}; choose debug, info, warning or error.")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}; it must be between 0 (any free port) and 65535.")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError("Only one of tls_cert_file and tls_key_file is given; give both or none.")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ConfigError("tls_client_ca_file needs tls_cert_file and tls_key_file.")
        if not (0 <= self.drain_delay < math.inf and 0 <= self.drain_timeout < math.inf):
            raise ConfigError("drain_delay and drain_timeout must be numbers, and not negative.")


class Settings(msgspec.Struct, frozen=True):
    """All options of the proxy."""

    server: ServerOptions
    proxy: ProxyConfig


def load_settings(path: str | None, given: dict[str, Any]) -> Settings:
    """The options of the file, if any, overridden by those ``given``, by name. Raises ConfigError."""
    values = {} if path is None else _read(Path(path))
    engines = [role for role in ROLES if given.get(role)]
    if engines and any(values.get(role) for role in ROLES):
        raise ConfigError(f"Both {path} and --{engines[0]} name engines; name them in one place.")
    values |= with_new_names({name: value for name, value in given.items() if value not in (None, [], ())}, RENAMED)
    of_server = {name: values.pop(name) for name in ServerOptions.__struct_fields__ if name in values}
    where = "The options" if path is None else path
    if not values.get("decode"):
        values["decode"] = ()
    return Settings(_convert(of_server, ServerOptions, where), _convert(values, ProxyConfig, where))


def watched_files(path: str, settings: Settings) -> set[Path]:
    """The files whose change causes a reload."""
    proxy, server = settings.proxy, settings.server
    addresses = [address for role in ROLES for address in getattr(proxy, role)]
    names = [path, proxy.api_keys_file, proxy.admin_key_file, server.tls_cert_file, server.tls_key_file]
    for address in addresses:
        names += [address.api_key_file, address.ca_file, address.cert_file, address.key_file]
    return {Path(name) for name in names if name is not None}


def _read(path: Path) -> dict[str, Any]:
    """The file as options by name: engines by role, paths absolute."""
    try:
        values = _decode(path, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read ({error.strerror}); check the path.") from error
    if not _has_names(values):
        raise ConfigError(f"The configuration {path} must be a mapping of options by name.")
    engines = values.pop("engines", [])
    if not isinstance(engines, list) or any(role in values for role in ROLES):
        raise ConfigError(f"{path}: engines must be a list of {{role, url, ...}}, and the only place for engines.")
    values = _absolute_paths(with_new_names(values, RENAMED), path.parent)
    for number, engine in enumerate(engines):
        where = f"{path}, engine {number + 1}"
        if not _has_names(engine) or engine.get("role") not in ROLES:
            raise ConfigError(f"{where}: the role is missing or unknown; it must be one of {', '.join(ROLES)}.")
        engine = _absolute_paths(engine, path.parent)
        role = engine.pop("role")
        if "kv" in engine:
            engine |= kv_address(str(engine.pop("kv")), where)
        if isinstance(engine.get("url"), str):
            engine["url"] = engine["url"].rstrip("/")
        values.setdefault(role, []).append(_convert(engine, EngineAddress, where))
    return values


def _decode(path: Path, content: bytes) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(content)
        if path.suffix == ".toml":
            return msgspec.toml.decode(content)
        if path.suffix in (".yaml", ".yml"):
            return msgspec.yaml.decode(content)
    except ImportError as error:
        raise ConfigError(f"Reading {path} needs the package {error.name or error}; install it with pip.") from error
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"The configuration {path} cannot be parsed: {error}.") from error
    raise ConfigError(f"The configuration {path} must end in .yaml, .toml or .json.")


def _has_names(values: Any) -> bool:
    """Whether it is a mapping by names; in YAML, ``on:`` and ``1:`` are none."""
    return isinstance(values, dict) and all(isinstance(name, str) for name in values)


def _absolute_paths(values: dict[str, Any], parent: Path) -> dict[str, Any]:
    return {
        name: str(parent / value) if name.endswith("_file") and isinstance(value, str) else value
        for name, value in values.items()
    }


def _convert(values: dict[str, Any], kind: type, where: str) -> Any:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}.") from error
