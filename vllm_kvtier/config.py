"""Every option of ``kv_connector_extra_config``: type, default, meaning and limits, in one place.

``KVTierConfig.from_extra_config`` is the only reader of that dict. The meaning of an option is data (the
``description`` in its annotation), so that documentation is generated: ``python -m vllm_kvtier.config``
prints the table as Markdown.
"""

import difflib
import functools
import ipaddress
import math
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.renamed import with_new_names
from vllm_kvtier.store.options import help_of

# A child of the logger "vllm", the only one that vLLM gives handlers.
logger = get_logger(__name__)

# Options of vLLM's NixlConnector that mean the same here, so that its command lines keep working.
ALIASES = {
    "bidirectional_kv_xfer": "bidirectional",
    "kv_recompute_threshold": "pull_threshold",
    "kv_lease_duration": "handoff_seconds",
    "decoder_kv_blocks_ttl": "retain_seconds",
    "backends": "nixl_backends",
}
# {old: new}: the old names work for one release.
RENAMED = {
    "lend_share": "peer_lease_share",
    "store_patience": "promotion_timeout",
    "ask_timeout": "lookup_timeout",
    "store_hold_share": "store_inflight_share",
}
# Options of vLLM's NixlConnector without a counterpart: the error names them.
NIXL_ONLY = (
    "enable_cross_layers_blocks",
    "enforce_handshake_compat",
    "engine_ttl",
    "num_threads",
    "push_registration_timeout",
)
MAX_MESSAGE_SECONDS = 86400  # of a duration in a message: a longer one would end the connection
MAX_FINGERPRINT = 512  # characters; the same
_ANY_ADDRESS = ("0.0.0.0", "::", "*", "")


def _doc(meaning: str, **limits: float) -> Meta:
    return Meta(description=meaning, **limits)


def _store(name: str, more: str = "", **limits: float) -> Meta:
    """Of the option of the store's process that it becomes, if this engine starts one."""
    text = re.sub(r"\b(?=(disk|mooncake)_\w)", "store_", help_of(name))
    return _doc(f"{text} {more}".strip(), **limits)


class KVTierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one engine. Times are in seconds, sizes in tokens, shares are of all KV cache blocks.

    Options that begin with ``store_`` and are those of the store's process (``_store``) are passed to a node store that
    this engine starts.
    """

    bidirectional: Annotated[
        bool, _doc("Retain finished requests' blocks, so that prefill engines can pull them from decode engines.")
    ] = False
    pull_threshold: Annotated[
        int,
        _doc("Minimum number of tokens for a pull or a peer fetch; a prompt that lacks fewer is computed.", ge=0),
    ] = 64
    handoff_seconds: Annotated[
        float,
        _doc(
            "How long a prefill engine keeps a finished prefill for the decode engine to pull; up to ten times as long "
            "while its request is queued there.",
            gt=0,
        ),
    ] = 30.0
    retain_seconds: Annotated[
        float, _doc("How long a finished request's blocks can be pulled when bidirectional is on.", gt=0)
    ] = 480.0
    retain_share: Annotated[
        float, _doc("Maximum share of the KV cache for retained blocks; beyond it the oldest are dropped.", gt=0, le=1)
    ] = 0.25
    handoff_share: Annotated[
        float,
        _doc(
            "Maximum share of the KV cache for prefills that wait to be pulled; one prompt alone may take more.",
            gt=0,
            le=1,
        ),
    ] = 0.9
    follow_share: Annotated[
        float,
        _doc(
            "Maximum share of the KV cache of a decode engine for prompts that it pulls while their prefill goes on; "
            "one prompt alone may take more. Further ones are pulled when their prefill has ended. 0: all are, and a "
            "prefill engine leases nothing before its end.",
            ge=0,
            le=1,
        ),
    ] = 0.25
    peer_fetch: Annotated[
        Literal["auto", "off"],
        _doc(
            "Prefixes in GPU caches of this node's other engines. auto: the engine copies them if that is expected to "
            "be faster than loading or computing them; needs the node store, which has the directory of blocks. off: "
            "the engine neither fetches from peers nor leases blocks to them, and no pull uses mapped memory."
        ),
    ] = "auto"
    same_node_pulls: Annotated[
        Literal["auto", "mapped", "nixl"],
        _doc(
            "How blocks of a prefill or decode engine of this node are pulled. mapped: copied from its mapped memory, "
            "if it can be mapped and peer_fetch permits it on both, else by NIXL. nixl: by NIXL. auto: mapped on GPUs, "
            "and between engines of unequal shape; nixl otherwise. See `engine-shapes.md`."
        ),
    ] = "auto"
    peer_lease_share: Annotated[
        float, _doc("Maximum share of the KV cache that is leased to peers of this node at a time.", gt=0, le=1)
    ] = 0.5
    endpoint_host: Annotated[
        str, _doc("Address on which other engines reach this one; other than loopback only with cluster_key_file.")
    ] = "127.0.0.1"
    endpoint_port: Annotated[
        int, _doc("TCP port. 0: any free one. Otherwise the data-parallel rank is added to it.", ge=0, le=65535)
    ] = 0
    advertise_host: Annotated[
        str | None, _doc("Address that other engines are given, if it differs from endpoint_host.")
    ] = None
    cluster_key_file: Annotated[str | None, _doc("File with the key that all engines of the cluster share.")] = None
    lease_seconds: Annotated[
        float,
        _doc("Duration of a lease on another engine's blocks, unless it is renewed.", gt=0, le=MAX_MESSAGE_SECONDS),
    ] = 10.0
    lookup_timeout: Annotated[
        float, _doc("Maximum wait for the answer of another engine or of the store; then the prompt is computed.", gt=0)
    ] = 2.0
    handshake_timeout: Annotated[float, _doc("Maximum duration of the first exchange with another engine.", gt=0)] = (
        10.0
    )
    transfer_timeout: Annotated[float, _doc("Maximum duration of one load, peer fetch or pull.", gt=0)] = 60.0
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        _doc("What happens to a request whose load failed. vLLM's own field of this name is not used."),
    ] = "recompute"
    host_buffer: Annotated[
        Literal["auto", "always", "never"],
        _doc(
            "Whether pulls pass through host memory, without peer_fetch; auto: only if NIXL cannot read the devices "
            "directly."
        ),
    ] = "auto"
    nixl_backends: Annotated[
        tuple[str, ...], _doc("NIXL backends for transfers, in order of preference.", min_length=1)
    ] = ("UCX",)
    model_fingerprint: Annotated[
        str | None,
        _doc(
            "Name of the exact model and weights, equal on all engines. Default: a digest of the weight files. Engines "
            "whose weights are in no files, or change at run time, share KV only if this is set: see `weights.md`."
        ),
    ] = None
    store: Annotated[
        str,
        _doc(
            "The node store, host memory that all engines of the node share. auto: use the running one, or start it. "
            "off: none. Otherwise the path of the Unix socket of a store that you run (`kvtier store`)."
        ),
    ] = "auto"
    store_size: Annotated[
        str | int,
        _doc(
            "Memory of a node store that this engine starts: bytes, a number with a unit (64GiB), or a share of the "
            "container's memory (25%). A running store keeps its size and its tiers."
        ),
    ] = "10%"
    codec: Annotated[
        str | dict[str, str],
        _doc(
            "Codec of KV in the node store: raw (unchanged), fp8, int8, k8v4, int4, ... (`kvtier quality` lists and "
            "measures them), auto (the smallest that a quality record of this model admits, otherwise raw), or one by "
            'kind of attention: {"full": "fp8", "sliding": "int4"}. Quantized caches are always stored unchanged.'
        ),
    ] = "raw"
    wire_codec: Annotated[
        str | dict[str, str],
        _doc(
            "Codec of pulls between engines, equal on both. Codecs other than raw use a host buffer for encoded pages, "
            "and switch peer_fetch off."
        ),
    ] = "raw"
    store_write: Annotated[
        Literal["all", "prompt", "off"],
        _doc("What is copied to the node store as blocks fill: prompts and generated text, prompts only, or nothing."),
    ] = "all"
    store_inflight_share: Annotated[
        float,
        _doc(
            "Maximum share of the KV cache that waits for copies to the node store and is not reused until then; "
            "further blocks are stored later.",
            gt=0,
            le=1,
        ),
    ] = 0.9
    load_policy: Annotated[
        Literal["measured", "always"],
        _doc(
            "measured: load from the node store only what is expected to arrive before it could be computed. always: "
            "load everything it has."
        ),
    ] = "measured"
    sync_load_ms: Annotated[
        float,
        _doc(
            "Maximum expected duration, in ms, of a synchronous load. With no other request running, the step waits "
            "for the load. With others running, the load must also be shorter than a quarter of a decode step or 2 ms, "
            "whichever is longer, and no request may be waiting. Loads from the node store, copies from GPUs of this "
            "node, and hand-offs and conversations that are read from mapped memory (`same_node_pulls`) can be "
            "synchronous. 0 disables. None is before vLLM 0.29, with data parallelism, pipeline stages, "
            "MultiConnector, or kv_load_failure_policy: fail.",
            ge=0,
        ),
    ] = 100.0
    switch_interval_ms: Annotated[
        float,
        _doc(
            "Python's thread switch interval in the engine's process while a step is launched and computed, in ms. "
            "Python's default of 5 ms delays vLLM's answers and this connector's messages. While vLLM schedules it is "
            "as before. 0: unchanged.",
            ge=0,
        ),
    ] = 0.5
    store_idle_seconds: Annotated[float, _store("idle_seconds", ge=0)] = 600.0
    store_huge_pages: Annotated[
        Literal["auto", "never"], _doc("Huge pages for the memory of a node store that this engine starts.")
    ] = "auto"
    store_numa: Annotated[Literal["local", "interleave"], _store("numa")] = "local"
    store_policy: Annotated[str, _store("policy")] = ""
    store_tenant_share: Annotated[float, _store("tenant_share", gt=0, le=1)] = 1.0
    store_state_share: Annotated[float, _store("state_share", gt=0, le=1)] = 0.5
    store_disk_path: Annotated[str, _store("disk_path")] = ""
    store_disk_size: Annotated[str | int, _store("disk_size")] = "64GiB"
    store_disk_preallocate: Annotated[bool, _store("disk_preallocate")] = False
    store_disk_backend: Annotated[Literal["auto", "POSIX", "GDS", "GDS_MT"], _store("disk_backend")] = "auto"
    store_disk_admission: Annotated[Literal["reuse", "all"], _store("disk_admission")] = "reuse"
    store_disk_min_tokens: Annotated[int, _store("disk_min_tokens", ge=0)] = 0
    store_object_url: Annotated[str, _store("object_url", "Credentials: where the cloud's own tools find them.")] = ""
    store_object_endpoint: Annotated[str, _store("object_endpoint")] = ""
    store_object_region: Annotated[str, _store("object_region")] = ""
    store_object_size: Annotated[str | int, _store("object_size")] = "64GiB"
    store_object_admission: Annotated[Literal["reuse", "all"], _store("object_admission")] = "reuse"
    store_mooncake_master: Annotated[str, _store("mooncake_master")] = ""
    store_mooncake_trusted_network: Annotated[bool, _store("mooncake_trusted_network")] = False
    store_mooncake_segment: Annotated[str | int, _store("mooncake_segment")] = "4GiB"
    store_mooncake_replicas: Annotated[int, _store("mooncake_replicas", ge=1, le=8)] = 2
    store_mooncake_host: Annotated[str, _store("mooncake_host")] = ""
    store_mooncake_protocol: Annotated[Literal["tcp", "rdma"], _store("mooncake_protocol")] = "tcp"
    store_mooncake_devices: Annotated[str, _store("mooncake_devices")] = ""
    store_mooncake_admission: Annotated[Literal["reuse", "all"], _store("mooncake_admission")] = "reuse"
    store_nodes: Annotated[str, _store("nodes")] = ""
    store_node_listen: Annotated[str, _store("node_listen")] = ""
    store_metrics_port: Annotated[int, _store("metrics_port", ge=0, le=65535)] = 0
    store_show_hidden_metrics: Annotated[bool, _store("show_hidden_metrics")] = False
    promotion_timeout: Annotated[
        float,
        _doc(
            "Maximum wait of a request while the node store promotes its blocks to memory from disk, another node or "
            "an object store. A request waits only while that is expected to be faster than computing.",
            ge=0,
            le=MAX_MESSAGE_SECONDS,
        ),
    ] = 30.0

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any] | None) -> "KVTierConfig":
        """Read ``kv_connector_extra_config``.

        Raises ConfigError that names every option that is unknown (with the nearest right one), of the wrong
        type, outside its limits, given twice under two names, or impossible together with another.
        """
        try:
            extra = with_new_names(extra or {}, RENAMED)
        except ConfigError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from error
        problems: list[str] = []
        given: dict[str, Any] = {}
        for option, value in extra.items():
            name = ALIASES.get(option, option)
            if name not in _ANNOTATIONS:
                problems.append(_unknown(option))
            elif name != option and name in extra:
                problems.append(f"{option} is NixlConnector's name for {name}; both are given: keep {name}.")
            else:
                try:
                    given[name] = _convert(name, value)
                except ConfigError as error:
                    problems.append(str(error) if name == option else f"{option}: {error}")
        if not problems:
            config = cls(**given)  # before anything is logged: the combination may be refused
            if aliases := tuple(option for option in extra if option in ALIASES):
                _note_aliases(aliases)
            return config
        raise ConfigError("kv_connector_extra_config: " + " ".join(problems))

    def without_prefixes(self) -> "KVTierConfig":
        """The options of an engine without vLLM's prefix caching: blocks have no hashes to store or find them by."""
        return msgspec.structs.replace(self, store="off", store_nodes="", bidirectional=False)

    def without_effect(self) -> list[str]:
        """The options that are not at their defaults and do nothing, as ``store`` says that this engine starts no
        store, or has none."""
        if self.store == "auto":
            return []
        used = () if self.store == "off" else ("store_write", "store_inflight_share")
        defaults = zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
        return [
            name
            for name, default in defaults
            if name.startswith("store_") and name not in used and getattr(self, name) != default
        ]

    def __post_init__(self) -> None:
        if problems := list(_impossible(self)):
            raise ConfigError("kv_connector_extra_config: " + " ".join(problems))


def _impossible(config: KVTierConfig):
    """Yield a sentence for each combination of options that cannot work, also on this machine."""
    host, advertised = config.endpoint_host, config.advertise_host
    if not _is_loopback(host) and config.cluster_key_file is None:
        yield (
            f"endpoint_host {host!r} listens beyond this machine, which needs a key shared by the cluster: "
            f"set cluster_key_file, or leave endpoint_host at 127.0.0.1."
        )
    if host.strip("[]") in _ANY_ADDRESS and advertised is None:
        yield f"endpoint_host {host!r} is not an address that other engines can connect to: set advertise_host too."
    if advertised is not None and advertised.strip("[]") in _ANY_ADDRESS:
        yield f"advertise_host {advertised!r} is not an address that other engines can connect to."
    elif advertised is not None and _is_loopback(host) and not _is_loopback(advertised):
        yield (
            f"advertise_host {advertised!r} cannot be reached while endpoint_host {host!r} accepts only this "
            f"machine's connections: set endpoint_host to a network address, or remove advertise_host."
        )
    if config.cluster_key_file is not None and not Path(config.cluster_key_file).is_file():
        yield f"cluster_key_file {config.cluster_key_file!r} is not a file on this machine."
    if len(config.model_fingerprint or "") > MAX_FINGERPRINT:
        yield f"model_fingerprint has {len(config.model_fingerprint or '')} characters; at most {MAX_FINGERPRINT}."
    if len(set(config.nixl_backends)) < len(config.nixl_backends):
        yield f"nixl_backends {list(config.nixl_backends)} names a backend twice: name each once."
    if config.store not in ("auto", "off") and "/" not in config.store and not config.store.endswith(".sock"):
        yield f'store {config.store!r} must be "auto", "off" or the path of a socket, such as /run/kvtier/store.sock.'
    if config.store == "off" and config.store_nodes:
        yield (
            "store_nodes needs a store, and store is off: only a store reads from other nodes' stores. Give the engine "
            'one that has room for the KV of the prompts it reads at once (store "auto", store_size), with store_write '
            '"off" if the engine is to store nothing; or remove store_nodes.'
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _unknown(option: str) -> str:
    if option in NIXL_ONLY:
        return f"{option} is an option of NixlConnector that KVTierConnector does not have: remove it."
    if near := difflib.get_close_matches(option, [*_ANNOTATIONS, *ALIASES], n=1, cutoff=0.5):
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
        raise ConfigError(f"{name} must be {_describe_type(annotation)}, not {value!r}.")
    return converted


@functools.cache  # once a process: both sides of the connector read the options
def _note_aliases(names: tuple[str, ...]) -> None:
    logger.info(
        "kv_connector_extra_config: %s", ", ".join(f"{name} (NixlConnector) read as {ALIASES[name]}" for name in names)
    )


def _describe_type(annotation: Any) -> str:
    base, *rest = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    meta = next((m for m in rest if isinstance(m, Meta)), Meta())
    origin, args = get_origin(base), get_args(base)
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _describe_type(arg) for arg in args)
    if origin is tuple:
        least = "at least one " if meta.min_length else ""
        return f"a list of {least}{_describe_type(args[0]).removeprefix('a ')}"
    if origin is dict:
        return f"an object of {_describe_type(args[1]).removeprefix('a ')}s"
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


def markdown_table() -> str:
    """The options as a Markdown table, a row an option, in the order of the class."""
    lines = ["| Option | Value | Default | Meaning |", "|---|---|---|---|"]
    for name, default in zip(KVTierConfig.__struct_fields__, KVTierConfig.__struct_defaults__, strict=True):
        annotation, shown = _ANNOTATIONS[name], msgspec.json.encode(default).decode()
        meaning = next(m for m in get_args(annotation) if isinstance(m, Meta)).description
        for other, own in ALIASES.items():
            meaning += f" NixlConnector's `{other}` is accepted." * (own == name)
        for old, own in RENAMED.items():
            meaning += f" Old name, for one release: `{old}`." * (own == name)
        lines.append(f"| `{name}` | {_describe_type(annotation)} | `{shown}` | {meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
