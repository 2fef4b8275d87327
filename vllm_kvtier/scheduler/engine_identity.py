"""This engine's instance, namespace, codecs and ranks, which become known while the engine starts."""

import hashlib
import os
from collections.abc import Callable, Mapping

import msgspec

from vllm_kvtier.cache_kinds import describe_kind
from vllm_kvtier.codecs import Codec, choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.integrity.checksum_index import ContentKeys
from vllm_kvtier.scheduler.matching.transfer_params import Address
from vllm_kvtier.shapes.read_paths import Reach, reach
from vllm_kvtier.vllm_compat.engine_info import EngineInfo
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m

# Seconds that vLLM's scheduler thread waits, once and before it serves, for the weights' files to be read. A thousand
# files on a slow file system take longer; the engine serves meanwhile.
FIRST_WAIT = 0.5


class EngineIdentity:
    """``instance``: another one after each start and sleep. ``address``: where other engines reach this one; set when
    the lease server listens. ``namespace``: None until vLLM has made its hash seed and the weights' files were read.
    ``codec``, ``wire_codec``: of the store and between engines, without "auto". ``described``, ``ranks``,
    ``wire_codecs``: of the workers, by rank (reactor's thread)."""

    def __init__(
        self,
        config: KVTierConfig,
        info: EngineInfo,
        hash_block_size: int,
        uses_store: bool,
        on_named: Callable[[], object],
    ):
        """``uses_store``: whether the option ``codec`` matters. ``on_named`` is called (scheduler's thread) when the
        namespace is known."""
        self._config, self._info, self._hash_block_size = config, info, hash_block_size
        self._uses_store, self._on_named = uses_store, on_named
        self.address: Address = ("", 0)
        self.namespace: m.Namespace | None = None
        self.codec: str | Mapping[str, str] = Codec.RAW
        self.wire_codec: str | Mapping[str, str] = Codec.RAW
        self.wire_codecs: dict[int, str | dict[str, str]] = {}
        self.described: dict[int, lm.Described] = {}
        self.ranks: dict[int, m.RankInfo] = {}
        self._keys: ContentKeys | None = None
        self._waited = False  # for the weights' files
        self.renew_instance()

    def renew_instance(self) -> None:
        """A restarted engine is another instance, even with the same engine id and address; so is one that slept: its
        memory moved."""
        self.instance = f"{self._info.engine_id}/{os.urandom(4).hex()}"

    def start(self, on_ready: Callable[[], object]) -> None:
        """Begin to read the weights' files. ``on_ready`` is called on another thread when ``resolve_namespace`` can go
        on."""
        self._model = self._info.fingerprint(self._config.model_fingerprint, on_ready, self._resolve_codecs)

    def _resolve_codecs(self) -> None:
        """On that thread: ``auto`` reads the weights' files."""
        options = self._config.codec if self._uses_store else Codec.RAW, self._config.wire_codec
        self.codec, self.wire_codec = (choice.resolve(option, self._info.record_key) for option in options)

    # -- scheduler's thread ------------------------------------------------------------------------------------------

    def resolve_namespace(self) -> None:
        """Find the namespace once vLLM has made its hash seed (before the first request) and the weights' files are
        read. Requests that come earlier are private, see ``Provenance``."""
        if self.namespace is not None or self._info.unsupported:
            return
        model = self._model.get(0.0 if self._waited else FIRST_WAIT)
        self._waited = True
        if model is None:
            return
        bare = self._info.namespace(self._hash_block_size, model)
        self.namespace = msgspec.structs.replace(bare, codecs=choice.format_codecs(self.codec, self.wire_codec))
        self._keys = self._keys_of(self.namespace)
        self._on_named()

    def content_keys(self) -> ContentKeys:
        if self._keys is None:
            self.resolve_namespace()
            assert self._keys is not None, "a request was admitted before the namespace was known"
        return self._keys

    def content_keys_of(self, hash_block_size: int) -> ContentKeys:
        """The keys of an engine with another block size and otherwise our namespace; 0: ours."""
        own = self.content_keys()
        if self.namespace is None or hash_block_size in (0, self.namespace.hash_block_size):
            return own
        return self._keys_of(msgspec.structs.replace(self.namespace, hash_block_size=hash_block_size))

    @staticmethod
    def _keys_of(namespace: m.Namespace) -> ContentKeys:
        digest = hashlib.blake2b(m.encode(namespace.content()), digest_size=8).digest()
        return ContentKeys(int.from_bytes(digest, "little"))

    def bytes_for(self, tokens: int) -> int:
        """Bytes that one rank copies for ``tokens`` tokens of groups with ``whole_prefix``."""
        described = next(iter(self.described.values()), None)
        groups = described.groups if described is not None else ()
        whole = [group for group in groups if group.cache_kind.whole_prefix]
        return sum(tokens // group.block_tokens * group.block_bytes for group in whole)

    def describe(self) -> list[tuple[str, str]]:
        """What its KV depends on, for people; [] while the engine starts."""
        if self.namespace is None:
            return []
        parts = self._info.namespace_parts(self.namespace, self._config.model_fingerprint)
        codecs = _codec_words(self.codec), _codec_words(self.wire_codec)
        parts += [("codec of the store", codecs[0]), ("codec between engines", codecs[1])]
        layouts = dict.fromkeys(_layout_words(info) for info in self.ranks.values())
        parts.append(("KV cache layout", "; ".join(layouts)[:512] or "not known: its workers cannot be read from"))
        return parts

    # -- reactor's thread --------------------------------------------------------------------------------------------

    def hello(self) -> m.Hello | None:
        return m.Hello(m.PROTOCOL, self.instance, self.namespace) if self.namespace is not None else None

    def reach(self, theirs: list[m.RankInfo]) -> Reach:
        """How our ranks can read a peer's."""
        return reach(list(self.ranks.values()), theirs)


def _codec_words(codec: str | Mapping[str, str]) -> str:
    return codec if isinstance(codec, str) else ", ".join(f"{kind}: {name}" for kind, name in sorted(codec.items()))


def _layout_words(info: m.RankInfo) -> str:
    """Of one rank's pages; equal words do not make equal layouts, which engines compare in full."""
    words = []
    for group in info.geometry.groups:
        shape = ""
        if group.regions:
            first = group.regions[0]
            order = {"outer": ", heads before tokens", "token": ", tokens before heads"}.get(first.order, "")
            shape = f" of {first.outer} heads, {first.inner} bytes a token, {first.dtype or 'bytes'}{order}"
        layers = len({region.layer for region in group.regions})
        kind = describe_kind(group.kind, group.window)
        words.append(f"{layers} layers of {kind}{shape}, blocks of {group.block_tokens} tokens")
    return "; ".join(words)
