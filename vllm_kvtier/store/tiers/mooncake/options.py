"""The options of the Mooncake tier. The server checks them before it serves, and the tier's processes again.

Mooncake has no authentication, and its clients listen on all interfaces of a machine, whatever address they are given:
a program that reaches their ports, or the master's, can read, write and delete KV. Hence ``trusted_network``.
"""

import hashlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.remote_store.options import Address
from vllm_kvtier.store.memory.memory_limits import parse_bytes

MAX_REPLICAS = 8
ETCD_PORT = 2379
FORMS = "host:port, or etcd://host:port;host:port"  # the library's other way, redis://, is not in its wheels


@dataclass(frozen=True)
class MooncakeOptions:
    """From StoreOptions ``mooncake_master``, ``_segment``, ``_replicas``, ``_host``, ``_protocol``, ``_devices``.

    ``master``: as Mooncake's client takes it. ``probes``: addresses; one must accept connections before the
    client is set up, because its set-up blocks for 90 s without. ``host``: of this node for other nodes' clients, "" if
    it follows from the route to the master.
    """

    master: str
    probes: tuple[Address, ...]
    segment_bytes: int
    replicas: int
    host: str
    protocol: str
    devices: str

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> "MooncakeOptions":
        """Raises ConfigError for invalid options, and for a network that is not declared as trusted."""
        master = str(options["mooncake_master"]).strip()
        scheme, rest = master.split("://", 1) if "://" in master else ("", master)
        if scheme not in ("", "etcd"):
            raise ConfigError(f"store option mooncake_master={master!r}: must be {FORMS}")
        words = [word for word in re.split("[;,]", rest.rstrip("/")) if word] if scheme else [rest]
        probes = []
        for word in words:
            address = Address.parse(word) or (Address.parse(f"{word}:{ETCD_PORT}") if scheme else None)
            if address is None:
                raise ConfigError(f"store option mooncake_master={master!r}: must be {FORMS}")
            probes.append(address)
        if not probes:
            raise ConfigError(f"store option mooncake_master={master!r}: must be {FORMS}")
        if not options["mooncake_trusted_network"]:
            raise ConfigError(
                "store option mooncake_master: Mooncake has no authentication, and its clients listen on all of a "
                "machine's interfaces: what reaches them can read and delete KV. If only trusted machines do, set "
                "mooncake_trusted_network (engines: store_mooncake_trusted_network) to true"
            )
        replicas = int(str(options["mooncake_replicas"]))
        if not 1 <= replicas <= MAX_REPLICAS:
            raise ConfigError(f"store option mooncake_replicas={replicas}: must be 1 to {MAX_REPLICAS}")
        segment = str(options["mooncake_segment"])
        return cls(
            master,
            tuple(probes),
            0 if segment == "0" else parse_bytes(segment, "store option mooncake_segment"),
            replicas,
            str(options["mooncake_host"]),
            str(options["mooncake_protocol"]),
            str(options["mooncake_devices"]),
        )

    @property
    def cluster_digest(self) -> str:
        """Equal on two nodes that use the same cluster and name its master alike. "": on another node this name means
        another machine."""
        if any(probe.loopback for probe in self.probes):
            return ""
        masters = " ".join(sorted(str(probe) for probe in self.probes))
        return hashlib.blake2b(f"mooncake {masters}".encode(), digest_size=16).hexdigest()

    def own_host(self) -> str:
        """``host``, or the address of this node on the route to the master. Raises OSError if there is no route, and
        ConfigError for an IPv6 address: the library writes it without brackets, and no read from there succeeds."""
        host = self.host or self._host_on_route()
        if ":" in host:
            raise ConfigError(f"Mooncake cannot read over IPv6, and {host} is this node's address: set mooncake_host")
        return host

    def _host_on_route(self) -> str:
        addresses = socket.getaddrinfo(self.probes[0].host, self.probes[0].port, type=socket.SOCK_DGRAM)
        found = min(addresses, key=lambda each: each[0])  # IPv4, if there is one
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(found[4])
            return str(probe.getsockname()[0])


def reachable(address: Address, seconds: float) -> bool:
    """Whether something accepts connections there. Blocks for ``seconds`` at most, and for a name's resolution."""
    try:
        socket.create_connection((address.host, address.port), seconds).close()
    except OSError:
        return False
    return True
