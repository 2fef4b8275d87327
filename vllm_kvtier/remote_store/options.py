"""The options of a store that concern other nodes' stores. The server checks them before it serves, and the tier
process again."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.wire.auth import ClusterKey, is_loopback

MAX_NODES = 64  # in the list; the store keeps a connection to each
DNS = "dns:"  # before a name with an address for each of several stores
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """``host``: a name or an IP address, an IPv6 one without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address | None":
        """Parse "host:port", an IPv6 address in brackets, an IPv4 one also in these. None for anything else. Resolves
        no name."""
        match = _ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match[2]) < 1 << 16:
            return None
        return cls(match[1].strip("[]"), int(match[2]))

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def endpoint(self) -> str:
        return f"tcp://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class NodeOptions:
    """From StoreOptions ``nodes``, ``node_listen`` and ``cluster_key_file``. ``key`` None: loopback only. ``shared``:
    as in ``protocol.Hello``. ``names``: those of ``nodes`` with "dns:"."""

    nodes: tuple[Address, ...] = ()
    listen: Address | None = None
    key: ClusterKey | None = None
    shared: tuple[str, ...] = ()
    names: tuple[Address, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> "NodeOptions":
        """``nodes``: host:port, or dns:name:port for all addresses of a name.

        Raises ConfigError for an invalid address, and for one beyond loopback without a cluster key.
        """
        file = str(options.get("cluster_key_file", ""))
        key = ClusterKey.load(file) if file else None
        words = [word.strip() for word in str(options.get("nodes", "")).split(",") if word.strip()]
        if len(words) > MAX_NODES:
            raise ConfigError(f"store option nodes names {len(words)} stores; at most {MAX_NODES} are allowed")
        names = [word.removeprefix(DNS) for word in words if word.startswith(DNS)]
        words = [word for word in words if not word.startswith(DNS)]
        nodes, named = (tuple(dict.fromkeys(_address("nodes", word) for word in each)) for each in (words, names))
        listen = str(options.get("node_listen", "")).strip()
        listens = _address("node_listen", listen) if listen else None
        parsed = cls(nodes, listens, key, tuple(str(options.get("shared", "")).split()), named)
        for name, addresses in (("nodes", nodes + named), ("node_listen", (parsed.listen,) if parsed.listen else ())):
            for address in addresses:
                if not parsed.allows(address):
                    raise ConfigError(
                        f"store option {name}: {address} is beyond this machine's loopback, which requires a cluster "
                        "key; set cluster_key_file to the same file on all nodes (`python -m vllm_kvtier.wire.auth "
                        "FILE` writes one)"
                    )
        return parsed

    def allows(self, address: Address) -> bool:
        """Whether a connection there is allowed."""
        return self.key is not None or address.loopback


def _address(option: str, word: str) -> Address:
    address = Address.parse(word)
    if address is None:
        raise ConfigError(f"store option {option}: {word!r} is not host:port (IPv6: [address]:port)")
    return address
