"""Every option of ``kv_connector_extra_config``: type, default, meaning and limits, in one place.

``KVTierConfig.from_extra_config`` is the only reader of that dict. The meaning of an option is data (the
``description`` in its annotation), so that documentation is generated: ``python -m vllm_kvtier.config``
prints the table as Markdown.
"""

import difflib
import functools
import ipaddress
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger

# A child of the logger "vllm", the only one that vLLM gives handlers.
logger = get_logger("vllm.kvtier.config")

# Options of vLLM's NixlConnector that mean the same here, so that its command lines keep working.
ALIASES = {
    "bidirectional_kv_xfer": "bidirectional",
    "kv_recompute_threshold": "pull_threshold",
    "kv_lease_duration": "handoff_seconds",
    "decoder_kv_blocks_ttl": "retain_seconds",
    "backends": "nixl_backends",
}
# Options of vLLM's NixlConnector without a counterpart: named in the error instead of guessed at.
NIXL_ONLY = (
    "enable_cross_layers_blocks",
    "enforce_handshake_compat",
    "engine_ttl",
    "num_threads",
    "push_registration_timeout",
)
_ANY_ADDRESS = ("0.0.0.0", "::", "*", "")


def _doc(meaning: str, **limits: float) -> Meta:
    return Meta(description=meaning, **limits)


class KVTierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one engine. Times are in seconds, sizes in tokens, shares are of all KV cache blocks."""

    bidirectional: Annotated[
        bool, _doc("Keep finished requests' blocks pullable: prefill engines can pull from decode engines.")
    ] = False
    pull_threshold: Annotated[
        int, _doc("Fewest tokens worth a pull; a prompt that lacks fewer is computed.", ge=0)
    ] = 64
    handoff_seconds: Annotated[
        float,
        _doc("How long a prefill engine holds a finished prefill for the decode engine to fetch.", gt=0),
    ] = 30.0
    retain_seconds: Annotated[
        float, _doc("How long a finished request's blocks stay pullable when bidirectional is on.", gt=0)
    ] = 480.0
    retain_share: Annotated[
        float,
        _doc("Largest share of the KV cache so kept; above it the oldest are dropped at once.", gt=0, le=1),
    ] = 0.25
    handoff_share: Annotated[
        float, _doc("Largest share of the KV cache that prefills waiting to be fetched may hold.", gt=0, le=1)
    ] = 0.9
    peer_fetch: Annotated[
        Literal["auto", "off"],
        _doc(
            "Prefixes that other engines of this node have in their GPU caches: auto (copied from there, if that is "
            "sooner than loading or computing them; needs the node store, which knows who has what) or off, both ways."
        ),
    ] = "auto"
    lend_share: Annotated[
        float,
        _doc("Largest share of the KV cache that engines of this node may be copying from at a time.", gt=0, le=1),
    ] = 0.5
    endpoint_host: Annotated[
        str,
        _doc("Address on which other engines reach this one; beyond loopback only with cluster_key_file."),
    ] = "127.0.0.1"
    endpoint_port: Annotated[
        int, _doc("TCP port; 0 takes any free one, else the data-parallel rank is added.", ge=0, le=65535)
    ] = 0
    advertise_host: Annotated[
        str | None, _doc("Address told to other engines, where it differs from endpoint_host.")
    ] = None
    cluster_key_file: Annotated[
        str | None, _doc("File with the key that all engines of the cluster share.")
    ] = None
    lease_seconds: Annotated[
        float, _doc("How long a lease on another engine's blocks lasts unless it is renewed.", gt=0)
    ] = 10.0
    ask_timeout: Annotated[
        float,
        _doc("Longest wait for another engine to say what it holds; then the prompt is computed.", gt=0),
    ] = 2.0
    handshake_timeout: Annotated[
        float, _doc("Longest wait for the first exchange with another engine.", gt=0)
    ] = 10.0
    transfer_timeout: Annotated[float, _doc("Longest time for the blocks of one pull to arrive.", gt=0)] = (
        60.0
    )
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        _doc("What becomes of a request whose load failed; vLLM's own field of this name is not used."),
    ] = "recompute"
    host_buffer: Annotated[
        Literal["auto", "always", "never"],
        _doc("Whether pulls pass through host memory; auto: only where devices cannot be read directly."),
    ] = "auto"
    nixl_backends: Annotated[
        tuple[str, ...], _doc("NIXL backends to transfer with, in order of preference.", min_length=1)
    ] = ("UCX",)
    model_fingerprint: Annotated[
        str | None,
        _doc(
            "Name of the exact model and weights, equal on all engines; made of the weights' files if not given. KV of "
            "weights that are in no files, or changed while the engine runs, is shared only with it: see `weights.md`."
        ),
    ] = None
    store: Annotated[
        str,
        _doc(
            "The node store, host memory shared by all engines of the node: auto (use the one that runs, or start it), "
            "off, or the path of the Unix socket of one that you run yourself (`kvtier store`)."
        ),
    ] = "auto"
    store_size: Annotated[
        str | int,
        _doc(
            "Memory of a node store that this engine starts: bytes, a number with a unit (64GiB), or a share of what "
            "the container may use (25%). A store that runs already keeps its size and its tiers."
        ),
    ] = "10%"
    codec: Annotated[
        str | dict[str, str],
        _doc(
            "How KV is kept in the node store: raw (as it is), fp8, int8, k8v4, int4, ... (`kvtier quality` lists and "
            "measures them), auto (the smallest that a quality record for this model admits, else raw), or one by kind "
            'of attention: {"full": "fp8", "sliding": "int4"}. Quantized caches always stay as they are.'
        ),
    ] = "raw"
    wire_codec: Annotated[
        str | dict[str, str],
        _doc(
            "The same for pulls between engines, equal on both; other than raw, they pass through encoded host memory."
        ),
    ] = "raw"
    store_write: Annotated[
        Literal["all", "prompt", "off"],
        _doc("What goes to the node store as blocks fill: prompts and generated text, prompts only, or nothing."),
    ] = "all"
    store_hold_share: Annotated[
        float,
        _doc(
            "Largest share of the KV cache kept from reuse while it is copied to the node store; blocks beyond it are "
            "stored later.",
            gt=0,
            le=1,
        ),
    ] = 0.9
    store_queue_gib: Annotated[
        float | None, _doc("Deprecated and ignored, with a warning: store_hold_share bounds what waits.")
    ] = None
    load_policy: Annotated[
        Literal["measured", "always"],
        _doc("Load from the node store only what is expected to arrive before it could be computed, or all it has."),
    ] = "measured"
    sync_load_ms: Annotated[
        float,
        _doc(
            "A request that is alone in the engine is computed in the step that loads it, on the heels of its blocks, "
            "if the load is expected to take no more milliseconds than this; among others, if it is brief as well (a "
            "quarter of a step that only generates, or 2 ms) and nobody else waits to begin. 0: never.",
            ge=0,
        ),
    ] = 100.0
    switch_interval_ms: Annotated[
        float,
        _doc(
            "Longest that a thread of the engine's process keeps Python's interpreter from the others (Python's own "
            "5 ms hold up vLLM's steps, its answers and this connector's messages); 0: left as it is.",
            ge=0,
        ),
    ] = 0.5
    store_idle_seconds: Annotated[
        float,
        _doc("A node store that this engine starts ends after so long without engines; 0: never.", ge=0),
    ] = 600.0
    store_huge_pages: Annotated[
        Literal["auto", "never"], _doc("Huge pages for the memory of a node store that this engine starts.")
    ] = "auto"
    store_numa: Annotated[
        Literal["local", "interleave"],
        _doc("On which NUMA nodes that memory lies: where it is first touched, or on all of them in turn."),
    ] = "local"
    store_policy: Annotated[
        str, _doc("Eviction policy of a node store that this engine starts: aging (if empty), arc, lru or s3fifo.")
    ] = ""
    store_tenant_share: Annotated[
        float, _doc("Largest share of the node store one tenant (cache salt) may fill.", gt=0, le=1)
    ] = 1.0
    store_disk_path: Annotated[
        str,
        _doc(
            "Directory where a node store that this engine starts keeps blocks on disk; empty: none. One store a "
            "directory; what it held is found again after a restart or a crash."
        ),
    ] = ""
    store_disk_size: Annotated[str | int, _doc("Most it may take there: bytes, or a number with a unit.")] = "64GiB"
    store_disk_preallocate: Annotated[
        bool, _doc("Take all of that from the file system at once, instead of as it fills.")
    ] = False
    store_disk_backend: Annotated[
        Literal["auto", "POSIX", "GDS", "GDS_MT"], _doc("NIXL backend that reads and writes there; auto is POSIX.")
    ] = "auto"
    store_disk_admission: Annotated[
        Literal["reuse", "all"],
        _doc(
            "What is written to disk: blocks that were seen a second time (found in memory, or stored anew after it "
            "had forgotten them), or all of them at the first."
        ),
    ] = "reuse"
    store_disk_min_tokens: Annotated[
        int, _doc("Prompts shorter than this are not written to disk or objects: computing them takes no longer.", ge=0)
    ] = 0
    store_object_url: Annotated[
        str,
        _doc(
            "s3://bucket/prefix where a node store that this engine starts keeps blocks and shares them with other "
            "nodes; credentials come from where AWS's own tools find them."
        ),
    ] = ""
    store_object_endpoint: Annotated[
        str, _doc("URL of an S3-compatible service, if it is not AWS's own.")
    ] = ""
    store_object_region: Annotated[str, _doc("Region of the bucket; empty: as AWS's own tools find it.")] = ""
    store_object_admission: Annotated[
        Literal["reuse", "all"], _doc("What is written to the object store, as store_disk_admission.")
    ] = "reuse"
    store_nodes: Annotated[
        str,
        _doc(
            "Other nodes' stores (host:port,host:port) that are asked for what is not here; see cluster_key_file. With "
            "store off this engine asks them and reads from them by itself, and keeps nothing."
        ),
    ] = ""
    store_node_listen: Annotated[
        str, _doc("host:port where other nodes' stores may ask a store that this engine starts; empty: nowhere.")
    ] = ""
    store_metrics_port: Annotated[
        int, _doc("Port of 127.0.0.1 for Prometheus, of a store that this engine starts; 0: none.", ge=0, le=65535)
    ] = 0
    store_patience: Annotated[
        float,
        _doc(
            "Longest wait for blocks that the node store is bringing up from disk, another node or an object store; "
            "a request waits only while that is expected to beat computing them.",
            ge=0,
        ),
    ] = 30.0

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any] | None) -> "KVTierConfig":
        """Read ``kv_connector_extra_config``.

        Raises ConfigError that names every option that is unknown (with the nearest right one), of the wrong
        type, outside its limits, given twice under two names, or impossible together with another.
        """
        extra = dict(extra or {})
        problems: list[str] = []
        given: dict[str, Any] = {}
        renamed: list[str] = []
        for option, value in extra.items():
            name = ALIASES.get(option, option)
            if name not in _ANNOTATIONS:
                problems.append(_unknown(option))
            elif name != option and name in extra:
                problems.append(f"{option} is NixlConnector's name for {name}; both are given: keep {name}.")
            else:
                if name != option:
                    renamed.append(option)
                try:
                    given[name] = _convert(name, value)
                except ConfigError as error:
                    problems.append(str(error) if name == option else f"{option}: {error}")
        if not problems:
            config = cls(**given)  # before anything is logged: the combination may be refused
            if config.store_queue_gib is not None:
                _warn_deprecated("store_queue_gib", "store_hold_share")
            if renamed:
                _note_aliases(tuple(renamed))
            return config
        raise ConfigError("kv_connector_extra_config: " + " ".join(problems))

    def without_prefixes(self) -> "KVTierConfig":
        """The same where vLLM's prefix caching is off: nothing is stored, or found by its content."""
        return msgspec.structs.replace(self, store="off", store_nodes="", bidirectional=False)

    def __post_init__(self) -> None:
        if problems := list(_impossible(self)):
            raise ConfigError("kv_connector_extra_config: " + " ".join(problems))


def _impossible(config: KVTierConfig):
    """Sentences about options that are right one by one and impossible together, or on this machine."""
    host, advertised = config.endpoint_host, config.advertise_host
    if not _is_loopback(host) and config.cluster_key_file is None:
        yield (
            f"endpoint_host {host!r} listens beyond this machine, which needs a key shared by the cluster: "
            f"set cluster_key_file, or leave endpoint_host at 127.0.0.1."
        )
    if host in _ANY_ADDRESS and advertised is None:
        yield f"endpoint_host {host!r} is no address that others could connect to: set advertise_host too."
    if advertised is not None and advertised in _ANY_ADDRESS:
        yield f"advertise_host {advertised!r} is no address that others could connect to."
    elif advertised is not None and _is_loopback(host) and not _is_loopback(advertised):
        yield (
            f"advertise_host {advertised!r} cannot be reached while endpoint_host {host!r} accepts only this "
            f"machine's connections: set endpoint_host to an address of the network, or drop advertise_host."
        )
    if config.cluster_key_file is not None and not Path(config.cluster_key_file).is_file():
        yield f"cluster_key_file {config.cluster_key_file!r} is not a file here."
    if len(set(config.nixl_backends)) < len(config.nixl_backends):
        yield f"nixl_backends {list(config.nixl_backends)} names a backend twice: name each once."


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _unknown(option: str) -> str:
    if option in NIXL_ONLY:
        return f"{option} is an option of NixlConnector that KVTierConnector does not have: remove it."
    near = difflib.get_close_matches(option, [*_ANNOTATIONS, *ALIASES], n=1, cutoff=0.5)
    if near:
        return f"{option} is not an option; did you mean {ALIASES.get(near[0], near[0])}?"
    return f"{option} is not an option; there are {', '.join(_ANNOTATIONS)}."


def _convert(name: str, value: Any) -> Any:
    """The value in the option's own type. Raises ConfigError that says what would be right."""
    annotation = _ANNOTATIONS[name]
    try:
        converted = msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        converted = None
        wrong = True
    else:
        wrong = isinstance(converted, float) and not math.isfinite(converted)
    if wrong:
        raise ConfigError(f"{name} must be {_type_in_words(annotation)}, not {value!r}.")
    return converted


@functools.cache  # once a process: both halves of the connector read the options
def _note_aliases(names: tuple[str, ...]) -> None:
    logger.info(
        "kv_connector_extra_config: %s",
        ", ".join(f"{name} (NixlConnector) read as {ALIASES[name]}" for name in names),
    )


@functools.cache
def _warn_deprecated(name: str, instead: str) -> None:
    logger.warning("kv_connector_extra_config: %s is deprecated and ignored; see %s", name, instead)


def _type_in_words(annotation: Any) -> str:
    base, *rest = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    meta = next((m for m in rest if isinstance(m, Meta)), Meta())
    origin, args = get_origin(base), get_args(base)
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _type_in_words(arg) for arg in args)
    if origin is tuple:
        least = "at least one " if meta.min_length else ""
        return f"a list of {least}{_type_in_words(args[0]).removeprefix('a ')}"
    if origin is dict:
        return f"an object of {_type_in_words(args[1]).removeprefix('a ')}s"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[base]
    limits = [
        f"{sign} {bound}"
        for sign, bound in ((">", meta.gt), ("at least", meta.ge), ("at most", meta.le))
        if bound is not None
    ]
    return " ".join([words, " and ".join(limits)]).strip()


# Resolved once: name -> Annotated[type, Meta], in the order of the class.
_ANNOTATIONS: dict[str, Any] = {
    name: hint
    for name, hint in get_type_hints(KVTierConfig, include_extras=True).items()
    if name in KVTierConfig.__struct_fields__
}


class Option(msgspec.Struct, frozen=True):
    """A row of the documentation: type in words, default as JSON, NixlConnector's name for it or None."""

    name: str
    type: str
    default: str
    meaning: str
    alias: str | None


def options() -> list[Option]:
    """All options in the order of the class, for documentation."""
    aliases = {own: other for other, own in ALIASES.items()}
    rows = []
    for name, default in zip(KVTierConfig.__struct_fields__, KVTierConfig.__struct_defaults__, strict=True):
        annotation = _ANNOTATIONS[name]
        meta = next(m for m in get_args(annotation) if isinstance(m, Meta))
        text = msgspec.json.encode(default).decode()
        rows.append(Option(name, _type_in_words(annotation), text, meta.description, aliases.get(name)))
    return rows


def markdown_table() -> str:
    """The options as a Markdown table, a row an option."""
    lines = ["| Option | Value | Default | Meaning |", "|---|---|---|---|"]
    for row in options():
        also = f" NixlConnector's `{row.alias}` is accepted." if row.alias else ""
        lines.append(f"| `{row.name}` | {row.type} | `{row.default}` | {row.meaning}{also} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
