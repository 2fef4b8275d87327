"""LoRA adapters as the engine has loaded them: fingerprints of their files, or none where those are not certainly it.

vLLM's block hash holds an adapter's name (0.33: and its path), so that the files must tell adapters apart. What the
engine computes with is what the files held when its workers read them, which they do when vLLM's ``add_lora`` is called
(the server calls it before any request), when a request comes whose adapter is not loaded, when it says
``load_inplace``, and again when the adapter fell out of the workers' LRU caches, which nothing here is told of. Hence:

* Files count by what ``stat`` says of them, inode and change time included. As long as that is what it was when the
  adapter was loaded, whoever reads them again reads the same. If it is not, the engine may compute with the old
  weights or with the new ones: nothing is shared until it is seen to load the adapter anew.
* vLLM's own prefix cache keeps KV of an adapter that is replaced under its name, and finds it for the new one. So a
  replaced adapter is not shared either until that cache is empty (``cache_is_empty``): it would be stored as the new
  one's. Requests that run while their adapter is replaced have KV of both: ``listeners`` hear of it.
* A hub's name counts only when the engine has just loaded it: which revision it loads is known afterwards.

Files are read by a thread of this module; stat is all that the engine's thread does. Engine's thread only.
"""

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.core import kv_cache_utils

from vllm_kvtier.file_digests import file_digests
from vllm_kvtier.fingerprint import model_folder
from vllm_kvtier.logs import get_logger

logger = get_logger("vllm.kvtier.adapters")

READ_SECONDS = 1.0  # so long a request waits for its adapter's files to be read; then it is computed
MOST = 10_000  # adapters; those beyond are not shared
# Fields of vLLM's LoRARequest that do not change what its weights are; whatever else a release has, counts.
_NAMING = ("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace")

Signature = tuple[tuple[Any, ...], ...]


def _signature(folder: Path) -> Signature | None:
    """Of the files that vLLM reads of an adapter's folder; None without weights, or if they cannot be looked at."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.name.startswith(("adapter_config.json", *_WEIGHTS)))
        if not any(name.startswith(_WEIGHTS[0]) for name in names):
            return None
        states = [os.stat(folder / name) for name in names]
    except OSError:
        return None
    return tuple(
        (name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for name, s in zip(names, states, strict=True)
    )


_WEIGHTS = ("adapter_model.", "new_embeddings.")


def _local(path: str) -> Path | None:
    """As vLLM's ``get_adapter_absolute_path``; None for a hub's name, which that would download."""
    if os.path.isabs(path):
        return Path(path)
    if path.startswith("~"):
        return Path(path).expanduser()
    return Path(os.path.abspath(path)) if os.path.exists(path) else None


class _Adapter:
    """What was loaded under one name. ``signature`` None: not known."""

    def __init__(self, lora: Any, folder: Path | None, signature: Signature | None):
        self.int_id, self.path, self.folder, self.signature = lora.lora_int_id, lora.lora_path, folder, signature
        self.digest: bytes | None = None
        self.began, self.reading = time.monotonic(), False
        rest = {field: getattr(lora, field) for field in lora.__struct_fields__ if field not in _NAMING}
        if rest.pop("tensorizer_config_dict", None):
            self.signature = None  # its weights are elsewhere
        if self.signature is None:
            logger.warning(
                "kvtier: KV of LoRA adapter %s is neither shared nor stored: its files (%s) cannot be found here, or "
                "were not read by this engine as they are", lora.lora_name, lora.lora_path,
            )
            return
        self.reading = True
        arguments = (f"{lora.lora_name}|{sorted(rest.items())}|", [row[0] for row in self.signature])
        threading.Thread(target=self._read, args=arguments, name="kvtier-adapter", daemon=True).start()

    def is_loaded_for(self, lora: Any) -> bool:
        """Whether the workers load nothing for this one, as far as they have not forgotten what they loaded."""
        return (self.int_id, self.path) == (lora.lora_int_id, lora.lora_path) and not lora.load_inplace

    def _read(self, beginning: str, names: list[str]) -> None:
        try:
            digest = hashlib.blake2b(beginning.encode(), digest_size=16)
            for name, found in zip(names, file_digests([self.folder / name for name in names]), strict=True):
                digest.update(f"{name}|{found}|".encode())
            if _signature(self.folder) == self.signature:
                self.digest = digest.digest()
        except Exception as error:
            logger.warning("kvtier: KV of the LoRA adapter in %s is neither shared nor stored: %s", self.folder, error)
        finally:
            self.reading = False


class Adapters:
    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Adapter] = {}  # by what vLLM's hashes hold of it
        self._replaced: set[tuple[Any, ...]] = set()  # vLLM's prefix cache may have KV of what was loaded before
        self.listeners: weakref.WeakSet[Any] = weakref.WeakSet()  # their ``adapter_replaced`` hears of an id's requests

    def fingerprint(self, lora: Any) -> bytes | None:
        """Equal for adapters with the same files, in all engines; None: not known, maybe not yet (``awaited``)."""
        key = _identity(lora)
        known = self._known.get(key)
        if known is None or not known.is_loaded_for(lora):
            # Its workers load it for this request, or have done so unseen. What a hub has is known only afterwards.
            folder = _local(lora.lora_path)
            known = self._take(lora, folder, None if folder is None else _signature(folder))
        if known is None or key in self._replaced or known.signature is None:
            return None
        if _signature(known.folder) != known.signature:
            logger.warning(
                "kvtier: KV of LoRA adapter %s is neither shared nor stored any more: its files in %s have changed, "
                "and this engine may have the old ones or the new; load it again (load_inplace)",
                lora.lora_name, known.folder,
            )
            return None
        return known.digest

    def awaited(self, lora: Any) -> bool:
        """Whether its fingerprint is expected in a moment."""
        key = _identity(lora)
        known = self._known.get(key) if key not in self._replaced else None
        return known is not None and known.reading and time.monotonic() - known.began < READ_SECONDS

    def load(self, lora: Any, work: Callable[[], Any]) -> Any:
        """``work`` is vLLM's, and loads it into the workers, unless they have it."""
        known = self._known.get(_identity(lora))
        if known is not None and known.is_loaded_for(lora):
            return work()
        before = _folder_and_signature(lora)
        try:
            return work()
        finally:
            folder, signature = _folder_and_signature(lora)
            # A hub's may just have been downloaded.
            same = (folder, signature) == before or _local(lora.lora_path) is None
            self._take(lora, folder, signature if same else None)

    def _take(self, lora: Any, folder: Path | None, signature: Signature | None) -> _Adapter | None:
        key, int_id = _identity(lora), lora.lora_int_id
        others = [k for k, a in self._known.items() if k == key or a.int_id == int_id]
        if not lora.load_inplace and any(
            self._known[k].int_id == int_id and self._known[k].path != lora.lora_path for k in others
        ):
            signature = None  # its workers load that path only if they have forgotten the other
        for other in others:
            adapter = self._known[other]
            if signature is None or adapter.signature != signature:
                self._replaced.add(other)
                del self._known[other]
                for listener in list(self.listeners):
                    listener.adapter_replaced(adapter.int_id)
        if key in self._known:
            self._known[key].int_id = int_id
        elif len(self._known) + len(self._replaced) < MOST:
            self._known[key] = _Adapter(lora, folder, signature)
        return self._known.get(key)

    def cache_is_empty(self) -> None:
        """vLLM's prefix cache holds nothing, and no request has any KV."""
        self._replaced.clear()

    def named(self, name: str) -> tuple[Any, bytes] | None:
        """(what to give ``hash_prompt``, fingerprint) of the adapter of this name that was loaded last; None: none
        was. Any thread."""
        for key, adapter in reversed(list(self._known.items())):
            if _name(key) == name and adapter.digest is not None:
                return SimpleNamespace(lora_name=name, lora_path=adapter.path), adapter.digest
        return None


def _folder_and_signature(lora: Any) -> tuple[Path | None, Signature | None]:
    folder = _local(lora.lora_path) or model_folder(lora.lora_path)
    return folder, None if folder is None else _signature(folder)


def _identity(lora: Any) -> tuple[Any, ...]:
    """What vLLM's block hashes hold of an adapter."""
    return tuple(kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora)))


def _name(identity: tuple[Any, ...]) -> str:
    """0.25.1 to 0.30: the name; then tagged, and since 0.33 with the path."""
    return identity[0] if isinstance(identity[0], str) else identity[0][1]


ADAPTERS = Adapters()  # of this process's engine
