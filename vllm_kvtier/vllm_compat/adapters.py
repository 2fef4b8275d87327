"""LoRA adapters as the engine has loaded them: fingerprints of their files, or none where those are not certainly it.

vLLM's block hash holds an adapter's name (since 0.31 its path, too): the files must tell adapters apart. What the
engine computes with is what the files held when its workers read them, which they do when vLLM's ``add_lora`` is called
(the server calls it before any request), when a request comes whose adapter is not loaded, in each step of one that
says ``load_inplace``, and again when the adapter fell out of the workers' LRU caches, which nothing here is told of.
Hence:

* Files count by what ``stat`` says of them, of their folder and of the links on the path to it, inode and change time
  included: what was replaced does not look the same again when it is put back. A request is shared if a look at them
  that begins when it has ended finds what they were when its adapter was loaded: then its workers have read nothing
  else. What it asks other engines for goes by a look when it is admitted. If a look finds other files, the engine may
  compute with the old weights or with the new ones: nothing is shared until it is seen to load the adapter anew.
* vLLM's own prefix cache keeps KV of an adapter that is replaced under its name, and finds it for the new one. So a
  replaced adapter is not shared either until the cache of each engine of this process was empty (``cache_is_empty``):
  it would be stored as the new one's.
* A hub's name counts only when the engine has just loaded it: which revision it loads is known afterwards. Which one
  it would load again is looked up like a path's files.

Files are looked at, and read, on threads of their own: a file system that hangs stops no engine. All else is the
engine's thread's only. What fails here switches the following of adapters off: then none is shared.
"""

import enum
import hashlib
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.v1.core import kv_cache_utils

from vllm_kvtier.file_digests import file_digests
from vllm_kvtier.fingerprint import model_folder, steps
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.probe import Feature, granted

logger = get_logger("vllm.kvtier.adapters")

READ_SECONDS = 1.0  # so long a request waits for its adapter's files to be read; then it is computed
LOOK_SECONDS = 0.1  # so long the engine waits for a look, which takes less than 1 ms: then nothing is known
# After a look that took longer there is none at that path for REST times as long: they share the engine's time with its
# steps.
SLOW_SECONDS = 0.02
REST = 100
LOAD_SECONDS = 1.0  # so long the engine waits for a look when an adapter is loaded, which takes longer itself
MOST = 10_000  # adapters; those beyond are not shared
# Fields of vLLM's LoRARequest that do not change what its weights are; whatever else a release has, counts.
_NAMING = ("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace")


class Answer(enum.Enum):
    AWAITED = "known in a moment"


AWAITED = Answer.AWAITED

Signature = tuple[tuple[Any, ...], ...]


def _signature(folder: Path) -> Signature | None:
    """Of the folder and the links that lead there, named "", and of the files that vLLM reads of it; None without
    weights, or if they cannot be looked at."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.name.startswith(("adapter_config.json", *_WEIGHTS)))
        if not any(name.startswith(_WEIGHTS[0]) for name in names):
            return None
        links = [state for _, state in steps(folder) if stat.S_ISLNK(state.st_mode)]
        states = [("", os.stat(folder)), *(("", link) for link in links), *((n, os.stat(folder / n)) for n in names)]
    except OSError:
        return None
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in states)


_WEIGHTS = ("adapter_model.", "new_embeddings.")


def _local(path: str) -> Path | None:
    """As vLLM's ``get_adapter_absolute_path``; None for a hub's name, which that would download."""
    if os.path.isabs(path):
        return Path(path)
    if path.startswith("~"):
        return Path(os.path.expanduser(path))  # of a user that is not there: as it stands
    return Path(os.path.abspath(path)) if os.path.exists(path) else None


class Found(NamedTuple):
    """What a look at an adapter's path found. ``local``: no hub's name."""

    folder: Path | None
    signature: Signature | None
    local: bool


_UNSEEN = Found(None, None, True)


def _find(path: str) -> Found:
    local = _local(path)
    folder = local or model_folder(path)
    return Found(folder, None if folder is None else _signature(folder), local is not None)


class Looks:
    """At adapters' files. Of a path whose file system is slow or hangs nothing is known for a while."""

    def __init__(self) -> None:
        # Engine's thread. Paths of which a look took long: its thread, and when the next one may begin.
        self._slow: dict[str, tuple[threading.Thread, float]] = {}

    def look(self, path: str, seconds: float | None = None, rests: bool = True) -> Found | None:
        """What one that begins now finds; None: nothing in ``seconds`` (None: ``LOOK_SECONDS``), or it is not looked
        at. ``rests``: False where what is not known now will not be known later."""
        began = time.monotonic()
        last, rests_until = self._slow.get(path, (None, 0.0))
        if last is not None and (last.is_alive() or rests and began < rests_until):
            return None
        self._slow.pop(path, None)
        if len(self._slow) >= MOST:
            self._slow = {p: (t, until) for p, (t, until) in self._slow.items() if t.is_alive() or began < until}
            if len(self._slow) >= MOST:
                return None
        seen: list[Found] = []
        thread = threading.Thread(target=_see, args=(path, seen), name="kvtier-adapter-look", daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS if seconds is None else seconds)
        ended, took = not thread.is_alive(), time.monotonic() - began
        if not ended or took > SLOW_SECONDS:
            self._slow[path] = thread, began + REST * took
        return seen[0] if ended and seen else None


def _see(path: str, seen: list[Found]) -> None:
    try:
        seen.append(_find(path))
    except Exception:
        logger.exception("kvtier: looking at the LoRA adapter in %s failed", path)


class _Adapter:
    """What was loaded under one name. ``signature`` None: not known."""

    def __init__(self, lora: Any, folder: Path | None, signature: Signature | None):
        self.number, self.path, self.folder, self.signature = lora.lora_int_id, lora.lora_path, folder, signature
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
        arguments = (f"{lora.lora_name}|{sorted(rest.items())}|", [row[0] for row in self.signature if row[0]])
        threading.Thread(target=self._read, args=arguments, name="kvtier-adapter", daemon=True).start()

    def is_loaded_for(self, lora: Any) -> bool:
        """Whether this is what the workers have for this one, as far as they have not forgotten it."""
        return (self.number, self.path) == (lora.lora_int_id, lora.lora_path)

    def is_awaited(self) -> bool:
        """Whether its digest is expected in a moment."""
        return self.reading and time.monotonic() - self.began < READ_SECONDS

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
        # vLLM's lora_int_id -> the path and files that the workers loaded under it; None: not known
        self._numbers: dict[int, tuple[str, Signature] | None] = {}
        self._untold = False  # whether the workers may have adapters that nothing here was told of
        self._full = False
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()  # vLLM's prefix caches in this process
        # -> those of them that may have KV of what was loaded before
        self._replaced: dict[tuple[Any, ...], weakref.WeakSet[Any]] = {}
        self._looks = Looks()
        self._lost = False

    def admit(self, lora: Any) -> "_Adapter | Answer | None":
        """For a request that is to be computed now: its adapter, with its digest; AWAITED: known in a moment. None: not
        known, and so is what its workers load for it."""
        return self._contained(self._admit, lora)

    def _admit(self, lora: Any) -> "_Adapter | Answer | None":
        known = self._loaded(lora)
        if known is not None and known.is_awaited():
            return AWAITED
        found = self._looks.look(lora.lora_path, rests=known is not None and not lora.load_inplace)
        if known is None or lora.load_inplace:
            # Its workers load it for this request, or have done so unseen. What a hub has is known only afterwards.
            local = found is not None and found.local
            known = self._take(lora, *((found.folder, found.signature) if local else (None, None)))
        if known is None or not self._agrees(known, lora, found):
            return None
        return AWAITED if known.is_awaited() else self._current(lora)

    def current(self, lora: Any) -> "_Adapter | None":
        """What the workers were last seen to load for this one, with its digest; its files are not looked at."""
        return self._contained(self._current, lora)

    def _current(self, lora: Any) -> "_Adapter | None":
        known = self._loaded(lora)
        good = known is not None and known.signature is not None and known.digest is not None
        return known if good and not self._replaced.get(_identity(lora)) else None

    def confirm(self, lora: Any, adapter: "_Adapter | None") -> bool:
        """A request with this one has ended, whose ``admit`` answered ``adapter``: whether its workers have read
        nothing else until now. If they may have, nothing of it is shared that the prefix cache has."""
        return bool(self._contained(self._confirm, lora, adapter))

    def _confirm(self, lora: Any, adapter: "_Adapter | None") -> bool:
        known = self._loaded(lora)
        if known is None or known.signature is None:
            return False
        return self._agrees(known, lora, self._looks.look(lora.lora_path)) and known is adapter is self._current(lora)

    def _loaded(self, lora: Any) -> "_Adapter | None":
        known = self._known.get(_identity(lora))
        return known if known is not None and known.is_loaded_for(lora) else None

    def _agrees(self, known: "_Adapter", lora: Any, found: Found | None) -> bool:
        if found is None or known.signature is None:
            return False
        if found.signature != known.signature:
            # Whatever comes back there later: a worker may have read this meanwhile.
            known.signature = None
            logger.warning(
                "kvtier: KV of LoRA adapter %s is neither shared nor stored any more: its files in %s have changed, "
                "and this engine may have the old ones or the new; load it again (load_inplace)",
                lora.lora_name, known.folder,
            )
            return False
        return True

    def unseen(self, lora: Any) -> None:
        """A request is computed without ``admit``: what its workers load for it is not known."""
        self._contained(self._unseen, lora)

    def _unseen(self, lora: Any) -> None:
        if self._loaded(lora) is None or lora.load_inplace:
            self._take(lora, None, None)

    def load(self, lora: Any, work: Callable[[], Any]) -> Any:
        """``work`` is vLLM's, and loads it into the workers, unless they have it. It runs once, and what it returns or
        raises passes unchanged."""
        before = self._contained(self._before, lora)
        try:
            return work()
        finally:
            if before is not None:
                self._contained(self._after, lora, before)

    def _before(self, lora: Any) -> Found | None:
        known = self._loaded(lora)
        return self._look_for_load(lora) if known is None or lora.load_inplace else None

    def _look_for_load(self, lora: Any) -> Found:
        return self._looks.look(lora.lora_path, LOAD_SECONDS, rests=False) or _UNSEEN

    def _after(self, lora: Any, before: Found) -> None:
        found = self._look_for_load(lora)
        # A hub's may just have been downloaded.
        self._take(lora, found.folder, found.signature if found == before or not found.local else None)

    def _contained(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._lost or not granted(Feature.ADAPTERS):
            return None
        try:
            return work(*args)
        except Exception:
            self._lost = True  # what the workers have is not known any more
            logger.exception("kvtier: KV of LoRA adapters is neither shared nor stored any more")
            return None

    def _take(self, lora: Any, folder: Path | None, signature: Signature | None) -> _Adapter | None:
        key, number = _identity(lora), lora.lora_int_id
        if number not in self._numbers and len(self._numbers) >= MOST:
            if not self._full:
                self._full = True
                logger.warning(
                    "kvtier: KV of further LoRA adapters is neither shared nor stored until this engine is restarted: "
                    "it was given %d", MOST,
                )  # fmt: skip
            return None
        if number in self._numbers or self._untold:
            # The workers go by the number, and load this only if they have forgotten what they had, or are told to.
            # Of several engines one was.
            trusted = lora.load_inplace and len(self.engines) < 2
            if not trusted and self._numbers.get(number) != (lora.lora_path, signature):
                signature = None
        self._numbers[number] = None if signature is None else (lora.lora_path, signature)
        for other, adapter in list(self._known.items()):
            if other == key or adapter.number == number:
                if signature is None or adapter.signature != signature:
                    if self.caches:
                        self._replaced[other] = weakref.WeakSet(self.caches)
                    del self._known[other]
        if key in self._known:
            self._known[key].number, self._known[key].path = number, lora.lora_path
        elif len(self._known) + len(self._replaced) < MOST:
            self._known[key] = _Adapter(lora, folder, signature)
        return self._known.get(key)

    def untold(self) -> None:
        """The workers may have been given other adapters, under any number: only what is loaded in place is known."""
        self._contained(self._untell)

    def _untell(self) -> None:
        self._untold = True
        self._numbers = dict.fromkeys(self._numbers)
        for adapter in self._known.values():
            adapter.signature = None
        if self._known:
            logger.warning(
                "kvtier: KV of LoRA adapters is neither shared nor stored until they are loaded again (load_inplace): "
                "a call of collective_rpc, or sleep, may have changed them"
            )

    def cache_is_empty(self, cache: object) -> None:
        """This one of ``caches`` holds nothing, and no request of its engine has any KV."""
        for key, caches in list(self._replaced.items()):
            caches.discard(cache)
            if not caches:
                del self._replaced[key]

    def named(self, name: str) -> tuple[Any, bytes] | None:
        """(what to give ``hash_prompt``, fingerprint) of the adapter of this name that was loaded last; None: none
        was. Any thread."""
        for key, adapter in reversed(list(self._known.items())):
            if _name(key) == name and adapter.digest is not None:
                return SimpleNamespace(lora_name=name, lora_path=adapter.path), adapter.digest
        return None


def _identity(lora: Any) -> tuple[Any, ...]:
    """What vLLM's block hashes hold of an adapter."""
    return tuple(kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora)))


def _name(identity: tuple[Any, ...]) -> str:
    """0.25.1 to 0.30: the name; since 0.31 tagged, and with the path."""
    return identity[0] if isinstance(identity[0], str) else identity[0][1]


ADAPTERS = Adapters()  # of this process's engines
