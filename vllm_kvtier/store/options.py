"""The node store's options: names, defaults, help texts and checks. The command lines are generated from them."""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.remote_store.options import NodeOptions
from vllm_kvtier.store.memory.memory_limits import ANY_MACHINE, parse_bytes, pool_bytes
from vllm_kvtier.store.protocol import HOLD_SECONDS
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions
from vllm_kvtier.store.tiers.objects.object_names import check_endpoint, parse_url

T = TypeVar("T")


def _option(default: T, help: str, choices: tuple[str, ...] = ()) -> T:
    made: T = field(default=default, metadata={"help": help, "choices": choices})
    return made


# From a reservation to the end of the last copy that a worker begins into its slot, which must be the block's so long.
STORE_SECONDS = 100.0

# Options that say where secondary tiers are. A running store keeps those that it was started with.
PLACES = ("disk_path", "object_url", "mooncake_master", "mooncake_host", "nodes", "node_listen")


@dataclass(frozen=True)
class StoreOptions:
    """Raises ConfigError for an invalid value. The store's process checks ``size`` against the machine's memory
    (``memory_limits.pool_bytes``)."""

    size: str = _option(
        "auto",
        "Memory of the store: 64GiB, 64G (the same), 64GB (decimal), bytes, 10% of the container's memory, or auto: a "
        "quarter of it, less if less is free.",
    )
    huge_pages: str = _option(
        "auto",
        "2 MiB pages. auto: reserved ones (vm.nr_hugepages) if there are enough, otherwise transparent ones if the "
        "kernel allows; always: fail without reserved ones; never.",
        ("auto", "never", "always"),
    )
    numa: str = _option(
        "local",
        "NUMA nodes of the memory. local: the node that first touches a page; interleave: all nodes in turn.",
        ("local", "interleave"),
    )
    idle_seconds: float = _option(600.0, "End after this time without an engine; 0: never.")
    policy: str = _option(
        "", "Eviction policy: aging (if empty), arc, lru or s3fifo.", ("", "aging", "arc", "lru", "s3fifo")
    )
    tenant_share: float = _option(
        1.0,
        "Maximum share of the memory, 0 to 1, of one tenant (cache salt). Blocks promoted from disk "
        "count in it, those from other tiers do not.",
    )
    state_share: float = _option(
        0.5,
        "Share of the memory, 0 to 1, beyond which recurrent states evict older states only, once it is full.",
    )
    pin_share: float = _option(0.5, "Maximum share of the memory, 0 to 1, for pinned blocks.")
    lease_seconds: float = _option(
        60.0, "Duration of a lease, at least 60: a longer load is no longer protected from eviction."
    )
    reserve_seconds: float = _option(120.0, "Duration of a reservation, above 100: a longer write loses its slots.")
    disk_path: str = _option(
        "",
        "Directory of the disk tier, in one that exists; empty: no disk tier. One store a directory. The blocks in it "
        "are found again after a restart or a crash.",
    )
    disk_size: str = _option("64GiB", "Maximum size of the disk tier: bytes, 500GiB, or the like.")
    disk_preallocate: bool = _option(False, "Allocate all of the disk tier at the start, instead of as it fills.")
    disk_backend: str = _option(
        "auto", "NIXL backend of the disk tier: POSIX (auto), GDS or GDS_MT.", ("auto", "POSIX", "GDS", "GDS_MT")
    )
    disk_direct: str = _option(
        "auto", "Bypass the page cache: auto (if the file system can), or never.", ("auto", "never")
    )
    disk_admission: str = _option(
        "reuse",
        "Which blocks are demoted to disk. reuse: on their second use (a hit in memory, or stored again after "
        "eviction). all: on their first.",
        ("all", "reuse"),
    )
    disk_min_tokens: int = _option(
        0,
        "Prompts with fewer tokens are not demoted to a secondary tier: computing takes no longer. Of models with "
        "recurrent states alone all are: the store does not know their lengths.",
    )
    disk_queue_mib: int = _option(
        0, "Maximum size of a tier's queue of demotions; further blocks are not demoted. 0: all of the memory."
    )
    object_url: str = _option(
        "",
        "Where the object tier is, shared between nodes: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix "
        "or a directory on a shared file system, file:///directory; empty: none.",
    )
    object_endpoint: str = _option("", "URL of an S3-compatible or other service; empty: the cloud's own.")
    object_region: str = _option("", "Region of an S3 bucket; empty: as AWS_REGION says.")
    object_size: str = _option("64GiB", "Maximum size of a shared directory, file:///directory. Buckets have none.")
    object_admission: str = _option(
        "reuse", "Which blocks are demoted to the object store, as disk_admission.", ("all", "reuse")
    )
    mooncake_master: str = _option(
        "",
        "Master of a Mooncake Store cluster that keeps blocks in the memory of its nodes: host:port, or of several "
        "masters etcd://host:port;host:port; empty: none. Needs mooncake_trusted_network.",
    )
    mooncake_trusted_network: bool = _option(
        False, "Only trusted machines reach the cluster's ports: Mooncake has neither authentication nor encryption."
    )
    mooncake_segment: str = _option(
        "4GiB", "Memory of this node, beside the store's, for the Mooncake cluster: bytes, 4GiB or the like; 0: none."
    )
    mooncake_replicas: int = _option(
        2, "Maximum copies in the cluster of a block that several nodes use often; 1: no copies."
    )
    mooncake_host: str = _option(
        "", "Address of this node for the cluster's other nodes; empty: that of the route to the master."
    )
    mooncake_protocol: str = _option("tcp", "Mooncake's transport between nodes.", ("tcp", "rdma"))
    mooncake_devices: str = _option("", "RDMA devices for mooncake_protocol=rdma: mlx5_0,mlx5_1; empty: all.")
    mooncake_admission: str = _option(
        "reuse", "Which blocks are demoted to the Mooncake cluster, as disk_admission.", ("all", "reuse")
    )
    nodes: str = _option(
        "",
        "Other nodes' stores for lookups of what is not on this node: host:port,host:port. dns:name:port is each of "
        "the name's addresses, which are looked up again every 10 s.",
    )
    node_listen: str = _option("", "host:port on which this store serves other nodes' stores; empty: none.")
    cluster_key_file: str = _option("", "Key of the cluster; without one the store uses only loopback addresses.")
    metrics_port: int = _option(0, "Port of 127.0.0.1 for Prometheus; 0: none.")
    metrics_host: str = _option("127.0.0.1", "Address of the metrics; every client that can connect may read them.")
    show_hidden_metrics: bool = _option(False, "Export renamed metrics under their old names too, for one release.")
    log_file: str = _option("", "Log file (at most 2 MiB are kept); empty: standard error.")
    log_level: str = _option(
        "info", "Log level: debug, info, warning or error.", ("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, choices = getattr(self, option.name), option.metadata["choices"]
            if choices and value not in choices:
                names = ", ".join(filter(None, choices))
                raise ConfigError(f"store option {option.name}={value!r}: choose one of {names}")
        try:
            pool_bytes(self.size, ANY_MACHINE)
        except ConfigError as error:
            raise ConfigError(f"store option size: {error}") from error
        if self.disk_min_tokens < 0 or self.disk_queue_mib < 0:
            raise ConfigError("store options disk_min_tokens and disk_queue_mib: 0 or more")
        for name in ("disk_path", "cluster_key_file", "log_file"):
            if path := getattr(self, name):  # absolute, because processes with other working directories use it
                object.__setattr__(self, name, os.path.abspath(os.path.expanduser(path)))
        if not 0 <= self.metrics_port < 1 << 16:
            raise ConfigError(f"store option metrics_port={self.metrics_port}: 1 to 65535, or 0 for no metrics")
        if self.disk_path:
            parse_bytes(self.disk_size, "store option disk_size")
        if self.object_url:
            parse_url(self.object_url)
            parse_bytes(self.object_size, "store option object_size")
        check_endpoint(self.object_endpoint)
        if self.mooncake_master:
            MooncakeOptions.parse(self.named("mooncake_"))
        NodeOptions.parse({name: getattr(self, name) for name in ("nodes", "node_listen", "cluster_key_file")})
        for name in ("tenant_share", "state_share", "pin_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"store option {name}={getattr(self, name)}: must be above 0 and at most 1")
        if not 2 * HOLD_SECONDS <= self.lease_seconds <= 86400:
            raise ConfigError(
                f"store option lease_seconds={self.lease_seconds}: must be {2 * HOLD_SECONDS:g} to 86400, because "
                f"blocks may be leased for {HOLD_SECONDS:g} s before they are read"
            )
        if not STORE_SECONDS < self.reserve_seconds <= 86400:
            raise ConfigError(
                f"store option reserve_seconds={self.reserve_seconds}: must be above {STORE_SECONDS:g} and at most "
                "86400"
            )
        if not 0 <= self.idle_seconds < 1 << 31:
            raise ConfigError(f"store option idle_seconds={self.idle_seconds}: must be 0 (never) or more")

    def named(self, prefix: str) -> dict[str, str | int | float | bool]:
        """The options whose names begin so."""
        return {option.name: getattr(self, option.name) for option in fields(self) if option.name.startswith(prefix)}

    def places(self) -> dict[str, str]:
        """Where the secondary tiers are, by option; without those that are not set."""
        return {name: place for name in PLACES if (place := str(getattr(self, name)))}

    def arguments(self) -> list[str]:
        """Command-line arguments that ``parse`` turns into these options again."""
        return [
            f"--{option.name.replace('_', '-')}={getattr(self, option.name)}"
            for option in fields(self)
            if getattr(self, option.name) != option.default
        ]


def same_place(one: str, other: str) -> bool:
    """Whether two values of an option of ``PLACES`` mean the same: lists in another order, too."""
    words, others = ({word.rstrip("/") for word in re.split(r"[,;\s]+", value)} - {""} for value in (one, other))
    return words == others


def help_of(name: str) -> str:
    return str(next(option.metadata["help"] for option in fields(StoreOptions) if option.name == name))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option in fields(StoreOptions):
        switch = isinstance(option.default, bool)  # alone as with ``kvtier store``, or with its value
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=_truth if switch else type(option.default),
            nargs="?" if switch else None,
            const=True if switch else None,
            default=option.default,
            choices=option.metadata["choices"] or None,
            metavar=None if option.metadata["choices"] else option.name.rpartition("_")[2].upper(),
            help=option.metadata["help"].replace("%", "%%") + f" Default: {option.default or 'none'}.",
        )


def _truth(word: str) -> bool:
    """Parse true or false; argparse's bool accepts any word as true."""
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{word!r}: true or false")
    return word.lower() == "true"


def from_namespace(namespace: argparse.Namespace) -> StoreOptions:
    return StoreOptions(**{option.name: getattr(namespace, option.name) for option in fields(StoreOptions)})


def parse(arguments: Sequence[str]) -> StoreOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_namespace(parser.parse_args(arguments))
