"""Fingerprints of the LoRA adapters that the engine has loaded, and whether their KV may be shared.

vLLM's block hash holds an adapter's name (since 0.31 its path, too), so the files must tell adapters apart. The engine
computes with the bytes that its workers read: when vLLM's ``add_lora`` is called (the server does so before any
request), when a request names an adapter that is not loaded, in each step of a request with ``load_inplace``, and again
when the workers' LRU caches dropped the adapter, which no call reports. Hence:

* Files are compared by ``stat`` of themselves, of their folder and of the links on the path, with inode and change
  time: a file that was replaced and put back does not look the same. A request's KV is shared if a look that begins
  when the request has ended finds the files as they were when its adapter was loaded: then its workers read nothing
  else. Its lookups at other engines go by a look at admission. If a look finds other files, the engine may compute with
  the old weights or the new: nothing is shared until it is seen to load the adapter again.
* vLLM's prefix cache keeps KV of an adapter that is replaced under its name, and finds it for the new one. So a
  replaced adapter is not shared either until the cache of each engine of this process was empty (``cache_is_empty``).
* A hub's name is trusted only when the engine has just loaded it: the loaded revision is known only afterwards. The
  revision that it would load again is looked up like a path's files.

Threads of their own look at files and read them: a file system that hangs stops no engine. All else runs on vLLM's
scheduler thread. An internal error switches this module off: then no adapter is shared.
"""

import enum
import functools
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
from vllm_kvtier.fingerprint import has_own_times, is_on, model_folder, steps
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

logger = get_logger(__name__)

READ_SECONDS = 1.0  # a request waits this long for its adapter's files to be read; then it is computed
LOOK_SECONDS = 0.25  # the scheduler waits this long for a look, which takes less than 1 ms; then nothing is known
# A path whose look took longer than SLOW_SECONDS is not looked at for PAUSE_FACTOR times as long, nor is any other such
# path: the scheduler spends a hundredth of its time at most on them together. The first FREE_SECONDS of slow looks do
# not count, and are given back at that rate: one look on a busy machine says nothing of its file system. What shorter
# looks take beyond SHORT_SECONDS counts in the same way, but for a twentieth of the time at most: with local files, two
# busy cores and 60 looks a second it was 3 %.
SLOW_SECONDS = 0.02
PAUSE_FACTOR = 100
SHORT_SECONDS = 0.001
SHORT_PAUSE_FACTOR = 20
FREE_SECONDS = 0.5
LOAD_SECONDS = 1.0  # the same as LOOK_SECONDS when an adapter is loaded, which takes longer itself
MAX_ADAPTERS = 10_000  # further adapters are not shared
# Fields of vLLM's LoRARequest that do not change the weights; every other field of a release counts.
_NAMING = ("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace")


class Answer(enum.Enum):
    AWAITED = "the adapter's files are being read"


AWAITED = Answer.AWAITED

Signature = tuple[tuple[Any, ...], ...]

_WEIGHTS = ("adapter_model.", "new_embeddings.")


def _signature(folder: Path) -> Signature | None:
    """``stat`` of the folder and the links that lead there, named "", and of the files that vLLM reads in it; None if
    there are no weights or they cannot be looked at. A folder in a bucket is left out, and so are the numbers of FUSE's
    inodes, and links of /proc (KServe), which change when the kernel has dropped them."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.name.startswith(("adapter_config.json", *_WEIGHTS)))
        if not any(name.startswith(_WEIGHTS[0]) for name in names):
            return None
        places = [state for state in [os.stat(folder)] if has_own_times(state)]
        links = [state for _, state in steps(folder) if stat.S_ISLNK(state.st_mode)]
        places += [link for link in links if not is_on("proc", link.st_dev)]
        states = [*(("", place) for place in places), *((name, os.stat(folder / name)) for name in names)]
    except OSError:
        return None
    return tuple(
        (name, s.st_dev, 0 if is_on("fuse", s.st_dev) else s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for name, s in states
    )


def _local(path: str) -> Path | None:
    """As vLLM's ``get_adapter_absolute_path``; None for a hub's name, which that function would download."""
    if os.path.isabs(path):
        return Path(path)
    if path.startswith("~"):
        return Path(os.path.expanduser(path))  # unchanged if there is no such user
    return Path(os.path.abspath(path)) if os.path.exists(path) else None


class Found(NamedTuple):
    """What a look at an adapter's path found. ``local``: the path is not a hub's name."""

    folder: Path | None
    signature: Signature | None
    local: bool


_UNSEEN = Found(None, None, True)


def _find(path: str) -> Found:
    local = _local(path)
    folder = local or model_folder(path)
    return Found(folder, None if folder is None else _signature(folder), local is not None)


class Looks:
    """Looks at adapters' files, each on a thread of its own. On the scheduler thread."""

    def __init__(self) -> None:
        # The last look at each path whose last look was not short, and whether it was slow.
        self._long: dict[str, tuple[threading.Thread, bool]] = {}
        self._paused_until = {True: float("-inf"), False: float("-inf")}  # no second look at these before: slow, short

    def look(
        self, path: str, seconds: float | None = None, pauses: bool = True, second: bool = False
    ) -> Found | None:
        """What a look that begins now finds; None if it took longer than ``seconds`` (default: ``LOOK_SECONDS``) or was
        not made. ``pauses`` False: look even after a slow look, because a later one will not tell the same. ``second``:
        the one at admission is worth nothing without this one, which only slow looks keep from being made."""
        began, (last, slow) = time.monotonic(), self._long.get(path, (None, False))
        paused = pauses and began < self._paused_until[slow] and (slow or not second)
        if last is not None and (paused or last.is_alive()):
            return None
        self._long.pop(path, None)
        if len(self._long) >= MAX_ADAPTERS:
            self._long = {path: look for path, look in self._long.items() if look[0].is_alive()}
            if len(self._long) >= MAX_ADAPTERS:
                return None
        seen: list[Found] = []
        thread = threading.Thread(target=_see, args=(path, seen), name="kvtier-adapter-look", daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS if seconds is None else seconds)
        ended, took = not thread.is_alive(), time.monotonic() - began
        slow = not ended or took > SLOW_SECONDS
        pause = PAUSE_FACTOR * took if slow else SHORT_PAUSE_FACTOR * (took - SHORT_SECONDS)
        if pause > 0:
            self._long[path] = thread, slow
            if pauses:
                earliest = began - PAUSE_FACTOR * FREE_SECONDS
                self._paused_until[slow] = max(self._paused_until[slow], earliest) + pause
        return seen[0] if ended and seen else None


def _see(path: str, seen: list[Found]) -> None:
    try:
        seen.append(_find(path))
    except Exception:
        logger.exception("kvtier: LoRA adapters: looking at %s failed; its KV is not shared", path)


class _Adapter:
    """The adapter that was loaded under one name. ``signature`` None: its files are not known."""

    def __init__(self, lora: Any, folder: Path | None, signature: Signature | None):
        self.number, self.path, self.folder, self.signature = lora.lora_int_id, lora.lora_path, folder, signature
        self.numbers = {self.number}  # requests may still run under those before the last one
        self.digest: bytes | None = None
        self.began, self.reading = time.monotonic(), False
        rest = {field: getattr(lora, field) for field in lora.__struct_fields__ if field not in _NAMING}
        if rest.pop("tensorizer_config_dict", None):
            self.signature = None  # the weights are not in the folder
        if self.signature is None:
            logger.warning(
                "kvtier: LoRA adapters: the files of %s are unknown (%s cannot be found here, or changed since this "
                "engine loaded it); its KV is neither shared nor stored", lora.lora_name, lora.lora_path,
            )
            return
        self.reading = True
        arguments = (f"{lora.lora_name}|{sorted(rest.items())}|", [row[0] for row in self.signature if row[0]])
        threading.Thread(target=self._read, args=arguments, name="kvtier-adapter", daemon=True).start()

    def is_loaded_for(self, lora: Any) -> bool:
        """Whether the workers have this adapter for the request, unless they dropped it."""
        return (self.number, self.path) == (lora.lora_int_id, lora.lora_path)

    def is_awaited(self) -> bool:
        """Whether its digest is being computed and may be waited for."""
        return self.reading and time.monotonic() - self.began < READ_SECONDS

    def _read(self, beginning: str, names: list[str]) -> None:
        try:
            digest = hashlib.blake2b(beginning.encode(), digest_size=16)
            for name, found in zip(names, file_digests([self.folder / name for name in names]), strict=True):
                digest.update(f"{name}|{found}|".encode())
            if _signature(self.folder) == self.signature:
                self.digest = digest.digest()
        except Exception as error:
            logger.warning("kvtier: LoRA adapters: reading %s failed (%s); its KV is not shared", self.folder, error)
        finally:
            self.reading = False


def _contained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return None from the first internal error on, and if this vLLM's adapters are not supported."""

    @functools.wraps(method)
    def contained(self: "Adapters", *args: Any) -> Any:
        if self._lost or not granted(Feature.ADAPTERS):
            return None
        try:
            return method(self, *args)
        except Exception:
            self._lost = True  # the adapters that the workers have are not known any more
            logger.exception("kvtier: LoRA adapters: internal error; their KV is no longer shared or stored")
            return None

    return contained


class Adapters:
    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Adapter] = {}  # by the key that vLLM's hashes hold
        # lora_int_id -> the path and files that the workers loaded under it; None: not known
        self._numbers: dict[int, tuple[str, Signature] | None] = {}
        self._removed_to = 0  # numbers up to this one may have been in it: vLLM's server counts its loads
        self._unknown_loads = False  # the workers may have adapters that this module did not see loaded
        self._full = False
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()  # vLLM's prefix caches in this process
        # adapter's key -> those caches that may have KV of the adapter that had it before
        self._replaced: dict[tuple[Any, ...], weakref.WeakSet[Any]] = {}
        self._looks = Looks()
        self._lost = False

    @_contained
    def admit(self, lora: Any) -> "_Adapter | Answer | None":
        """The adapter, with its digest, of a request that is to be computed now. AWAITED: its files are being read.
        None: its weights are not known, nor what the workers load for it."""
        known = self._loaded(lora)
        if known is not None and known.is_awaited():
            return AWAITED
        found = self._looks.look(lora.lora_path, pauses=known is not None and not lora.load_inplace)
        if known is None or lora.load_inplace:
            # The workers load it for this request, or did so unseen. A hub's revision is known only afterwards.
            local = found is not None and found.local
            known = self._take(lora, *((found.folder, found.signature) if local else (None, None)))
        if known is None or not self._agrees(known, lora, found):
            return None
        return AWAITED if known.is_awaited() else self.current(lora)

    @_contained
    def current(self, lora: Any) -> "_Adapter | None":
        """The adapter that the workers were last seen to load for this request, with its digest; without a look at its
        files."""
        known = self._loaded(lora)
        good = known is not None and known.signature is not None and known.digest is not None
        return known if good and not self._replaced.get(_identity(lora)) else None

    @_contained
    def confirm(self, lora: Any, adapter: "_Adapter | None") -> bool | None:
        """Whether the workers read nothing else for a request that has ended and whose ``admit`` returned ``adapter``.
        If they may have, none of its blocks in the prefix cache is shared."""
        known = self._loaded(lora)
        if known is None or known.signature is None:
            return False
        found = self._looks.look(lora.lora_path, second=adapter is not None)
        return self._agrees(known, lora, found) and known is adapter is self.current(lora)

    def _loaded(self, lora: Any) -> "_Adapter | None":
        known = self._known.get(_identity(lora))
        return known if known is not None and known.is_loaded_for(lora) else None

    def _agrees(self, known: "_Adapter", lora: Any, found: Found | None) -> bool:
        if found is None or known.signature is None:
            return False
        if found.signature != known.signature:
            # Even if the old files come back: a worker may have read these meanwhile.
            known.signature = None
            logger.warning(
                "kvtier: LoRA adapters: the files of %s in %s changed, and this engine may have the old or the new; "
                "its KV is neither shared nor stored until you load it again (load_inplace)",
                lora.lora_name, known.folder,
            )
            return False
        return True

    @_contained
    def unseen(self, lora: Any) -> None:
        """A request is computed without ``admit``: what the workers load for it is not known."""
        if self._loaded(lora) is None or lora.load_inplace:
            self._take(lora, None, None)

    def load(self, lora: Any, work: Callable[[], Any]) -> Any:
        """Run vLLM's ``work`` once, which loads the adapter into the workers unless they have it. Returns and raises
        what ``work`` does."""
        before = self._before(lora)
        try:
            return work()
        finally:
            if before is not None:
                self._after(lora, before)

    @_contained
    def _before(self, lora: Any) -> Found | None:
        known = self._loaded(lora)
        return self._look_for_load(lora) if known is None or lora.load_inplace else None

    def _look_for_load(self, lora: Any) -> Found:
        return self._looks.look(lora.lora_path, LOAD_SECONDS, pauses=False) or _UNSEEN

    @_contained
    def _after(self, lora: Any, before: Found) -> None:
        found = self._look_for_load(lora)
        # A hub's files may just have been downloaded.
        self._take(lora, found.folder, found.signature if found == before or not found.local else None)

    def _take(self, lora: Any, folder: Path | None, signature: Signature | None) -> _Adapter | None:
        key, number = _identity(lora), lora.lora_int_id
        if number not in self._numbers and len(self._numbers) >= MAX_ADAPTERS and not self._remove_numbers():
            self._say_full()
            return None
        if number in self._numbers or number <= self._removed_to or self._unknown_loads:
            # The workers go by the number. They load this adapter only if they dropped the one they had, or with
            # load_inplace, which only one of several engines was called with.
            trusted = lora.load_inplace and len(self.engines) < 2
            if not trusted and self._numbers.get(number) != (lora.lora_path, signature):
                signature = None
        self._numbers[number] = None if signature is None else (lora.lora_path, signature)
        for other, adapter in list(self._known.items()):
            if other == key or number in adapter.numbers:
                if signature is None or adapter.signature != signature:
                    if self.caches:
                        self._replaced[other] = weakref.WeakSet(self.caches)
                    del self._known[other]
        if key in self._known:
            known = self._known[key]
            known.number, known.path = number, lora.lora_path
            known.numbers.add(number)
        elif len(self._known) + len(self._replaced) < MAX_ADAPTERS:
            self._known[key] = _Adapter(lora, folder, signature)
        else:
            self._say_full()
        return self._known.get(key)

    def _remove_numbers(self) -> bool:
        """Remove numbers under which no known adapter is loaded any more: each load has another one. False: there are
        none."""
        used = {adapter.number for adapter in self._known.values()}
        unused = self._numbers.keys() - used
        self._removed_to = max(self._removed_to, *unused) if unused else self._removed_to
        self._numbers = {number: loaded for number, loaded in self._numbers.items() if number in used}
        return bool(unused)

    def _say_full(self) -> None:
        if not self._full:
            self._full = True
            logger.warning(
                "kvtier: LoRA adapters: this engine had %d; KV of further ones is neither shared nor stored until it "
                "is restarted", MAX_ADAPTERS,
            )  # fmt: skip

    @_contained
    def clear_loaded(self) -> None:
        """The workers may have other adapters now, under any number: only those loaded in place from now on are
        known."""
        self._unknown_loads = True
        self._numbers = dict.fromkeys(self._numbers)
        for adapter in self._known.values():
            adapter.signature = None
        if self._known:
            logger.warning(
                "kvtier: LoRA adapters: a call of collective_rpc, or sleep, may have changed them; their KV is neither "
                "shared nor stored until they are loaded again (load_inplace)"
            )

    def cache_is_empty(self, cache: object) -> None:
        """``cache``, one of ``caches``, is empty, and no request of its engine has any KV."""
        for key, caches in list(self._replaced.items()):
            caches.discard(cache)
            if not caches:
                del self._replaced[key]

    def named(self, name: str) -> tuple[Any, bytes] | None:
        """(argument for ``hash_prompt``, fingerprint) of the last adapter that was loaded under this name, or None. Any
        thread."""
        for key, adapter in reversed(list(self._known.items())):
            if _name(key) == name and adapter.digest is not None:
                return SimpleNamespace(lora_name=name, lora_path=adapter.path), adapter.digest
        return None


def _identity(lora: Any) -> tuple[Any, ...]:
    """The part of an adapter that vLLM's block hashes hold."""
    return tuple(kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora)))


def _name(identity: tuple[Any, ...]) -> str:
    """0.25.1 to 0.30: the name; since 0.31 tagged, and with the path."""
    return identity[0] if isinstance(identity[0], str) else identity[0][1]


ADAPTERS = Adapters()  # of this process's engines
