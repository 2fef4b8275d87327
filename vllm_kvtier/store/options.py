"""Options of the node store: one place for names, defaults, meanings and checks; the command lines follow it."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.limits import parse_bytes
from vllm_kvtier.store.lower.nodes.options import NodeOptions
from vllm_kvtier.store.lower.objects.names import check_endpoint, parse_url


def _option(default, help: str, choices: tuple[str, ...] = ()):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class StoreOptions:
    """Raises ConfigError for a value that cannot be meant. ``size`` is checked against the machine's memory later,
    by ``limits.pool_bytes``, and ``policy`` by ``server``: only the process that serves knows them."""

    size: str = _option(
        "auto",
        "Memory for the pool: 64GiB, 64G (the same), 64GB (decimal), bytes, 10% of what this container may use, or "
        "auto: a quarter of that, less where less is free.",
    )
    huge_pages: str = _option(
        "auto",
        "2 MiB pages: auto takes them where enough are reserved (vm.nr_hugepages), else transparent ones where "
        "the kernel allows; always fails without reserved ones; never.",
        ("auto", "never", "always"),
    )
    numa: str = _option(
        "local",
        "Where the pool lies on machines with several memory nodes: local (the kernel decides) or interleave.",
        ("local", "interleave"),
    )
    idle_seconds: float = _option(600.0, "End after so many seconds without an engine; 0: only when told to.")
    policy: str = _option("", "Eviction policy: aging (if empty), arc, lru or s3fifo.")
    tenant_share: float = _option(1.0, "Share of the pool, 0 to 1, that one named tenant may hold.")
    pin_share: float = _option(0.5, "Share of the pool, 0 to 1, that may be pinned.")
    lease_seconds: float = _option(60.0, "A load that takes longer is no longer protected from eviction.")
    reserve_seconds: float = _option(120.0, "A store that takes longer loses its slots.")
    disk_path: str = _option("", "Directory for blocks that memory has no room for; empty: no disk.")
    disk_size: str = _option("64GiB", "Most that may lie there: bytes, 500GiB, or the like.")
    disk_preallocate: bool = _option(False, "Take all of that from the file system at once.")
    disk_backend: str = _option(
        "auto", "NIXL backend that reads and writes: POSIX (auto), GDS or GDS_MT.", ("auto", "POSIX", "GDS", "GDS_MT")
    )
    disk_direct: str = _option(
        "auto", "Go round the page cache: where the file system can (auto), or never.", ("auto", "never")
    )
    disk_admission: str = _option(
        "reuse",
        "What is written: all blocks, or reuse: those seen a second time, found in memory or stored anew after memory "
        "had forgotten them; what is asked for once wears no disk.",
        ("all", "reuse"),
    )
    disk_min_tokens: int = _option(
        0, "Prompts shorter than this are not written, to disk or as objects: computing them takes no longer."
    )
    disk_queue_mib: int = _option(
        0, "Most that may wait for a tier to write it; what comes beyond it is not written. 0: all of the memory."
    )
    object_url: str = _option("", "s3://bucket/prefix that keeps blocks and shares them between nodes; empty: none.")
    object_endpoint: str = _option("", "URL of an S3-compatible service; empty: AWS.")
    object_region: str = _option("", "Region of the bucket; empty: as AWS's own tools find it.")
    object_backend: str = _option(
        "auto", "Who speaks S3: auto is NIXL's OBJ where it can be loaded, else boto3.", ("auto", "OBJ", "boto3")
    )
    object_admission: str = _option("reuse", "What is written there: as disk_admission.", ("all", "reuse"))
    nodes: str = _option("", "Stores of other nodes that are asked for what is not here: host:port,host:port.")
    node_listen: str = _option("", "host:port where other nodes' stores may ask for what is here; empty: nowhere.")
    cluster_key_file: str = _option("", "Key of the cluster; without one nothing listens or asks beyond loopback.")
    metrics_port: int = _option(0, "Port of 127.0.0.1 where Prometheus finds the store's metrics; 0: none.")
    metrics_host: str = _option("127.0.0.1", "Listen there for Prometheus instead; anybody who can connect may read.")
    log_file: str = _option("", "Log here (at most 2 MiB are kept) instead of standard error.")
    log_level: str = _option(
        "info", "How much to log: debug, info, warning or error.", ("debug", "info", "warning", "error")
    )

    def __post_init__(self):
        for option in fields(self):
            value, choices = getattr(self, option.name), option.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(f"store option {option.name}={value!r}: choose one of {', '.join(choices)}")
        if self.disk_min_tokens < 0 or self.disk_queue_mib < 0:
            raise ConfigError("store options disk_min_tokens and disk_queue_mib: 0 or more")
        for name in ("disk_path", "cluster_key_file", "log_file"):
            if path := getattr(self, name):  # what it names must not depend on where the processes run that use it
                object.__setattr__(self, name, os.path.abspath(os.path.expanduser(path)))
        if not 0 <= self.metrics_port < 1 << 16:
            raise ConfigError(f"store option metrics_port={self.metrics_port}: 1 to 65535, or 0 for no metrics")
        if self.disk_path:
            parse_bytes(self.disk_size, "store option disk_size")
        if self.object_url:
            parse_url(self.object_url)
        check_endpoint(self.object_endpoint)
        NodeOptions.parse({name: getattr(self, name) for name in ("nodes", "node_listen", "cluster_key_file")})
        for name in ("tenant_share", "pin_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"store option {name}={getattr(self, name)}: must be above 0 and at most 1")
        for name in ("lease_seconds", "reserve_seconds"):
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(f"store option {name}={getattr(self, name)}: must be above 0 and at most 86400")
        if not 0 <= self.idle_seconds < 1 << 31:
            raise ConfigError(f"store option idle_seconds={self.idle_seconds}: must be 0 (never) or more")

    def arguments(self) -> list[str]:
        """Command-line arguments that ``parse`` turns into these options again."""
        return [
            f"--{option.name.replace('_', '-')}={getattr(self, option.name)}"
            for option in fields(self)
            if getattr(self, option.name) != option.default
        ]


def help_of(name: str) -> str:
    return next(option.metadata["help"] for option in fields(StoreOptions) if option.name == name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option in fields(StoreOptions):
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=_truth if isinstance(option.default, bool) else type(option.default),
            default=option.default,
            choices=option.metadata["choices"] or None,
            metavar=None if option.metadata["choices"] else option.name.rpartition("_")[2].upper(),
            help=option.metadata["help"].replace("%", "%%") + f" Default: {option.default or 'none'}.",
        )


def _truth(word: str) -> bool:
    """For argparse, to which any word is true."""
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{word!r}: true or false")
    return word.lower() == "true"


def from_namespace(namespace: argparse.Namespace) -> StoreOptions:
    return StoreOptions(**{option.name: getattr(namespace, option.name) for option in fields(StoreOptions)})


def parse(arguments: Sequence[str]) -> StoreOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_namespace(parser.parse_args(arguments))
