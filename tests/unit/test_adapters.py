"""LoRA adapters are distinguished by what the engine has loaded of them; what is not known to be equal is not
shared."""

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import eventually
from vllm.lora.request import LoRARequest

from vllm_kvtier import fingerprint
from vllm_kvtier.vllm_compat import adapters as adapters_module
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import AWAITED, Adapters
from vllm_kvtier.vllm_compat.probe import features


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for limit in ("READ_SECONDS", "LOOK_SECONDS", "SLOW_SECONDS", "SHORT_SECONDS"):
        monkeypatch.setattr(adapters_module, limit, 60.0)  # however slow this machine is


def files(folder: Path, alpha: int = 16, weights: bytes = b"w" * 5000, name: str = "adapter_model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
    (folder / name).write_bytes(weights)
    return folder


def lora(folder: Path | str, name: str = "style", number: int = 1, inplace: bool = False) -> LoRARequest:
    return LoRARequest(name, number, str(folder), load_inplace=inplace)


def admitted(adapters: Adapters, request: LoRARequest):
    """What it is admitted with, when its files have been read."""
    found = []
    eventually(lambda: found.append(adapters.admit(request)) or found[-1] is not AWAITED)
    return found[-1]


def known(adapters: Adapters, request: LoRARequest) -> bytes | None:
    found = admitted(adapters, request)
    return None if found is None else found.digest


class Cache:
    """A prefix cache of vLLM's."""


def with_cache() -> tuple[Adapters, Cache]:
    adapters, cache = Adapters(), Cache()
    adapters.caches.add(cache)
    return adapters, cache


def fresh(folder: Path | str) -> bytes | None:
    """As another engine knows it."""
    return known(Adapters(), lora(folder))


def loaded(adapters: Adapters, request: LoRARequest) -> bytes | None:
    """As by vLLM's ``add_lora``."""
    assert adapters.load(request, lambda: True) is True
    return known(adapters, request)


def test_admit_equal_files_in_other_folder_gives_same_digest(tmp_path):
    one, copy = files(tmp_path / "a"), tmp_path / "b"
    shutil.copytree(one, copy)
    assert fresh(one) == fresh(copy) is not None


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"])
def test_admit_different_weight_or_configuration_gives_other_digest(tmp_path, name):
    """Weights in a .bin, and lora_alpha, which stands in the configuration only, were not looked at."""
    variants = [
        files(tmp_path / "a", name=name),
        files(tmp_path / "b", name=name, weights=b"w" * 4999 + b"x"),
        files(tmp_path / "c", name=name, alpha=32),
    ]
    (files(tmp_path / "d", name=name) / "new_embeddings.bin").write_bytes(b"e")
    found = [fresh(folder) for folder in [*variants, tmp_path / "d"]]
    assert None not in found and len(set(found)) == 4


def test_admit_unreadable_adapter_is_none(tmp_path, caplog):
    """Folders that are not there, hub names among them, and folders without weights once had one fingerprint."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "config only").mkdir()
    (tmp_path / "config only" / "adapter_config.json").write_text("{}")
    for folder in ("org/not-on-this-machine", tmp_path / "absent", "~/absent", empty, tmp_path / "config only"):
        adapters = Adapters()
        caplog.clear()
        assert [known(adapters, lora(folder)) for _ in range(3)] == [None] * 3
        assert loaded(adapters, lora(folder, number=2)) is None
        assert "neither shared nor stored" in caplog.text


def test_admit_hub_adapter_is_known_after_engine_loaded_it(tmp_path, monkeypatch):
    """Which revision it loads is not known before: vLLM asks the hub each time."""
    snapshot, adapters = files(tmp_path / "snapshot"), Adapters()
    monkeypatch.setattr(adapters_module, "model_folder", lambda name: snapshot if name == "org/adapter" else None)
    assert known(adapters, lora("org/adapter")) is None
    adapters = Adapters()
    assert loaded(adapters, lora("org/adapter")) == fresh(snapshot) is not None


def test_admit_changed_files_are_unknown_until_cache_is_empty(tmp_path, caplog):
    folder, (adapters, cache) = files(tmp_path / "a"), with_cache()
    before = loaded(adapters, lora(folder))
    state = (folder / "adapter_model.safetensors").stat()
    files(folder, weights=b"v" * 5000)
    os.utime(folder / "adapter_model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))  # as rsync does
    assert known(adapters, lora(folder)) is None and "load it again" in caplog.text
    adapters.cache_is_empty(cache)
    assert known(adapters, lora(folder)) is None, "the engine may have either, whatever its cache holds"
    assert loaded(adapters, lora(folder)) is None, "vLLM does not load what it has"
    adapters.load(lora(folder, inplace=True), lambda: True)
    assert known(adapters, lora(folder)) is None, "vLLM's cache has KV of the old one under its name"
    adapters.cache_is_empty(cache)
    after = known(adapters, lora(folder))
    assert after == fresh(folder) and after not in (None, before)


def test_admit_adapter_that_ran_under_a_number_replaced_in_place_is_unknown(tmp_path):
    """Its running requests go on with the other one, under its own name in vLLM's hashes."""
    x, y = files(tmp_path / "x"), files(tmp_path / "y", weights=b"v" * 5000)
    adapters, cache = with_cache()
    assert [known(adapters, lora(x, number=number)) for number in (1, 2)] == 2 * [fresh(x)]
    assert loaded(adapters, lora(y, "other", number=1, inplace=True)) is not None
    assert known(adapters, lora(x, number=2)) is None
    adapters.cache_is_empty(cache)
    assert known(adapters, lora(x, number=2)) == fresh(x)


def test_admit_adapter_in_a_bucket_whose_folder_always_looks_new_stays_known(tmp_path, monkeypatch):
    """blobfuse2 gives a folder the time of the look at it; the times of files are those of the last change."""
    folder, adapters = files(tmp_path / "a"), Adapters()
    monkeypatch.setattr(fingerprint, "is_on", lambda kind, device: kind == "fuse")
    before = loaded(adapters, lora(folder))
    (folder / "another").touch()
    (folder / "another").unlink()
    assert known(adapters, lora(folder)) == before is not None
    files(folder, weights=b"v" * 5000)
    assert known(adapters, lora(folder)) is None


def test_admit_replaced_adapter_is_known_after_every_cache_was_empty(tmp_path):
    """Another engine's says nothing about this one's, which still has KV of the old one."""
    folder, (adapters, cache) = files(tmp_path / "a"), with_cache()
    other, gone = Cache(), Cache()
    adapters.caches.update((other, gone))
    loaded(adapters, lora(folder))
    files(folder, weights=b"v" * 5000)
    adapters.load(lora(folder, inplace=True), lambda: True)
    adapters.cache_is_empty(other)
    assert known(adapters, lora(folder)) is None
    adapters.cache_is_empty(cache)
    assert known(adapters, lora(folder)) is None
    del gone
    assert known(adapters, lora(folder)) == fresh(folder) is not None


def test_admit_load_inplace_request_uses_current_files(tmp_path):
    """Servers of vLLM 0.25 to 0.32 keep ``load_inplace``: its workers read the files in each of its steps."""
    folder, adapters = files(tmp_path / "a"), Adapters()
    inplace = lora(folder, inplace=True)
    adapters.load(inplace, lambda: True)
    before = admitted(adapters, inplace)
    assert before.digest == fresh(folder) is not None and adapters.confirm(inplace, before)
    assert admitted(adapters, lora(folder)) is before
    files(folder, alpha=3)
    after = admitted(adapters, inplace)
    assert after.digest == fresh(folder) != before.digest and not adapters.confirm(inplace, before)
    assert adapters.confirm(inplace, after)


def test_admit_same_files_loaded_again_keep_digest(tmp_path):
    folder, adapters = files(tmp_path / "a"), Adapters()
    before = loaded(adapters, lora(folder))
    assert loaded(adapters, lora(folder, number=2)) == before is not None
    adapters.load(lora(folder, number=2, inplace=True), lambda: True)
    assert known(adapters, lora(folder, number=2)) == before


def test_admit_other_path_under_loaded_id_is_unknown(tmp_path):
    """vLLM goes by the number: it loads the path only if it has forgotten the other."""
    one, two, (adapters, cache) = files(tmp_path / "a"), files(tmp_path / "b", alpha=1), with_cache()
    loaded(adapters, lora(one))
    assert loaded(adapters, lora(two)) is None
    adapters.cache_is_empty(cache)
    assert known(adapters, lora(two)) is None


def test_admit_files_changed_during_load_are_unknown(tmp_path):
    folder, adapters = files(tmp_path / "a"), Adapters()
    adapters.load(lora(folder), lambda: files(folder, weights=b"changed"))
    assert known(adapters, lora(folder)) is None
    adapters = Adapters()
    with pytest.raises(ValueError):
        adapters.load(lora(folder), lambda: int("no such adapter"))


def test_admit_slow_files_wait_briefly_then_recompute(tmp_path, monkeypatch):
    may_read = threading.Event()
    digests = adapters_module.file_digests
    monkeypatch.setattr(adapters_module, "file_digests", lambda files: may_read.wait(60) and digests(files))
    adapters, request = Adapters(), lora(files(tmp_path / "a"))
    assert adapters.admit(request) is AWAITED, "the engine's thread goes on"
    monkeypatch.setattr(adapters_module, "READ_SECONDS", 0.0)
    assert adapters.admit(request) is None, "it is computed"
    may_read.set()
    assert eventually(lambda: adapters.admit(request))


def test_admit_on_hung_file_system_waits_once(tmp_path, monkeypatch):
    folder, adapters = files(tmp_path / "a"), Adapters()
    before = loaded(adapters, lora(folder))
    goes_on, find, looks = threading.Event(), adapters_module._find, []

    def hangs(path):
        looks.append(threading.current_thread())
        if path == str(folder):
            goes_on.wait(60)
        return find(path)

    monkeypatch.setattr(adapters_module, "_find", hangs)
    monkeypatch.setattr(adapters_module, "LOOK_SECONDS", 0.0)
    assert adapters.admit(lora(folder)) is None
    monkeypatch.setattr(adapters_module, "LOOK_SECONDS", 60.0)
    assert not adapters.confirm(lora(folder), adapters.current(lora(folder))) and len(looks) == 1
    assert known(adapters, lora(files(tmp_path / "b"), "other", 2)) is not None, "of another file system"
    goes_on.set()
    looks[0].join()
    assert eventually(lambda: known(adapters, lora(folder))) == before, "the workers have it, and it is what it was"
    assert threading.current_thread() not in looks


def test_admit_on_slow_file_system_stats_rarely(tmp_path, monkeypatch):
    """Each keeps the engine from its next step."""
    now, find, looks = [100.0], adapters_module._find, []

    def slow(path):
        looks.append(path)
        now[0] += 0.09
        return find(path)

    adapters, requests = Adapters(), [lora(files(tmp_path / name), name, i) for i, name in enumerate("ab", 1)]
    adapter = admitted(adapters, requests[0])
    monkeypatch.setattr(adapters_module, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(adapters_module, "FREE_SECONDS", 0.1)
    monkeypatch.setattr(adapters_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(adapters_module, "_find", slow)
    assert adapters.admit(requests[0]) is adapter and len(looks) == 1
    assert adapters.confirm(requests[0], adapter) and len(looks) == 2, "one slow look may be chance"
    for _ in range(32):
        assert adapters.admit(requests[0]) is None and not adapters.confirm(requests[0], adapter)
    assert len(looks) == 2
    assert adapters.admit(requests[1]) is not None and len(looks) == 3, "at another path"
    now[0] += 8.0
    assert adapters.confirm(requests[0], adapter) and len(looks) == 4, "it cannot have been something else meanwhile"
    assert not adapters.confirm(requests[0], adapter) and len(looks) == 4


@pytest.mark.parametrize("milliseconds", [0.9, 4.0, 15.0, 150.0])
def test_admit_and_confirm_look_for_a_bounded_share_of_the_time(tmp_path, monkeypatch, milliseconds):
    """With looks of 15 ms, 30 requests a second left an engine a tenth of its time."""
    now, find, spent = [100.0], adapters_module._find, [0.0]

    def slow(path):
        spent[0] += milliseconds / 1e3
        now[0] += milliseconds / 1e3
        return find(path)

    adapters, requests = Adapters(), [lora(files(tmp_path / str(i)), str(i), i) for i in range(1, 9)]
    found = [admitted(adapters, request) for request in requests]
    monkeypatch.undo()
    monkeypatch.setattr(adapters_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(adapters_module, "_find", slow)
    shared = []
    for i in range(3000):
        now[0] += 1 / 30
        request, adapter = requests[i % 8], found[i % 8]
        shared += [now[0]] * bool(adapters.admit(request) and adapters.confirm(request, adapter))
    seconds = now[0] - 100
    bound = 0.05 * seconds + 2.5 + 0.15 * 8  # the last: one look at each path before it is known to be slow
    assert len(shared) == 3000 if milliseconds < 1 else spent[0] * (1 - 1 / milliseconds) < bound
    assert milliseconds > 20 or shared[-1] > now[0] - 5, "some are shared"


def test_slow_path_does_not_pause_short_looks(tmp_path, monkeypatch):
    now, find = [100.0], adapters_module._find

    def takes(path):
        now[0] += 0.2 if path.endswith("slow") else 0.0015
        return find(path)

    adapters, requests = Adapters(), [lora(files(tmp_path / name), name, i) for i, name in enumerate(("slow", "b"), 1)]
    found = [admitted(adapters, request) for request in requests]
    monkeypatch.undo()
    monkeypatch.setattr(adapters_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(adapters_module, "_find", takes)
    shared = []
    for _ in range(1000):
        now[0] += 1 / 30
        for request, adapter in zip(requests, found, strict=True):
            shared += [request.lora_name] * bool(adapters.admit(request) and adapters.confirm(request, adapter))
    assert shared.count("b") == 1000 and shared.count("slow") < 100


def test_load_on_slow_file_system_is_recorded(tmp_path, monkeypatch):
    """It is not looked at for a while, but for what is loaded: what that is would never be known."""
    monkeypatch.setattr(adapters_module, "SLOW_SECONDS", 0.0)
    request, adapters = lora(files(tmp_path / "a")), Adapters()
    loaded(adapters, request)
    again = lora(files(tmp_path / "a", alpha=3), inplace=True)
    adapters.load(again, lambda: True)
    assert eventually(lambda: adapters.admit(request) not in (None, AWAITED))
    adapter = adapters.current(request)
    assert adapter is not None
    for _ in range(3):  # at the first, or at the next ones, nothing is looked at
        assert adapters.admit(again) in (None, adapter)
    assert adapters.current(request) is adapter


def test_admit_folder_exchanged_during_inplace_load_is_unknown(tmp_path, monkeypatch):
    """A folder above was exchanged and came back: nothing of it looks as if it had been another."""
    for name, alpha in (("here", 1), ("other", 7)):
        (tmp_path / name).mkdir()
        files(tmp_path / name / "a", alpha=alpha)
    folder, adapters = tmp_path / "here" / "a", Adapters()
    assert loaded(adapters, lora(folder)) is not None
    find = adapters_module._find
    monkeypatch.setattr(adapters_module, "_find", lambda path: 1 / 0)  # as one that takes too long
    (tmp_path / "here").rename(tmp_path / "kept")
    (tmp_path / "other").rename(tmp_path / "here")
    assert adapters.admit(lora(folder, inplace=True)) is None
    (tmp_path / "here").rename(tmp_path / "other")
    (tmp_path / "kept").rename(tmp_path / "here")
    monkeypatch.setattr(adapters_module, "_find", find)
    assert adapters.admit(lora(folder)) is None and adapters.current(lora(folder)) is None


def test_admit_adapter_loaded_while_lookup_failed_is_unknown(tmp_path, monkeypatch):
    folder, adapters = files(tmp_path / "a"), Adapters()
    monkeypatch.setattr(adapters_module, "_find", lambda path: 1 / 0)
    assert adapters.admit(lora(folder)) is None
    monkeypatch.undo()
    assert known(adapters, lora(folder)) is None


def test_confirm_after_files_were_replaced_is_false(tmp_path):
    """The adapter may have fallen out of the workers' cache, and they have read the new one in the middle of it."""
    folder, adapters = files(tmp_path / "a"), Adapters()
    adapter = admitted(adapters, lora(folder))
    assert adapters.confirm(lora(folder), adapter)
    other = shutil.copytree(folder, tmp_path / "b")
    folder.rename(tmp_path / "before")
    other.rename(folder)
    assert not adapters.confirm(lora(folder), adapter)
    folder.rename(tmp_path / "b")
    (tmp_path / "before").rename(folder)
    assert not adapters.confirm(lora(folder), adapter), "what it was is there again; what the workers have is not known"
    assert known(adapters, lora(folder)) is None


def test_admit_path_whose_symlink_changed_meanwhile_is_unknown(tmp_path):
    """Also one behind another. With the folder of before nothing of its files tells that the workers read others."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        files(tmp_path / version / "a", alpha=len(version))
    (tmp_path / "behind").symlink_to("v1")
    (tmp_path / "link").symlink_to(tmp_path / "behind")
    adapters, request = Adapters(), lora(tmp_path / "link" / "a")
    assert loaded(adapters, request) is not None and known(adapters, request) is not None
    for target in ("v2", "v1"):
        (tmp_path / "behind").unlink()
        (tmp_path / "behind").symlink_to(target)
    assert known(adapters, request) is None
    adapters.load(lora(tmp_path / "link" / "a", inplace=True), lambda: True)
    assert known(adapters, request) == fresh(tmp_path / "v1" / "a") is not None


def test_confirm_after_adapter_was_loaded_again_is_false(tmp_path):
    """With the files of before in the end, and no prefix cache that would remember it."""
    folder, other, adapters = files(tmp_path / "a"), files(tmp_path / "b", alpha=2), Adapters()
    running = admitted(adapters, lora(folder))
    for each in (other, folder):
        adapters.load(lora(each, inplace=True), lambda: True)
    again = admitted(adapters, lora(folder))
    assert again.digest == running.digest
    assert not adapters.confirm(lora(folder), running) and adapters.confirm(lora(folder), again)


def test_current_of_unloaded_adapter_is_none(tmp_path):
    """Files may be replaced while a request waits in vLLM's queue; its workers load what is there when it leaves it."""
    folder, adapters = files(tmp_path / "a"), Adapters()
    assert adapters.current(lora(folder)) is None and not adapters._numbers
    files(folder, alpha=3)
    assert known(adapters, lora(folder)) == fresh(folder) is not None
    assert adapters.current(lora(folder)).digest == fresh(folder)


def test_admit_hub_adapter_with_changed_revision_is_unknown(tmp_path, monkeypatch):
    """A worker that forgot it would load the new one."""
    snapshots = [files(tmp_path / "old"), files(tmp_path / "new", alpha=7)]
    monkeypatch.setattr(adapters_module, "model_folder", lambda name: snapshots[0])
    adapters = Adapters()
    assert loaded(adapters, lora("org/adapter"))
    del snapshots[0]
    assert known(adapters, lora("org/adapter")) is None


def test_admit_after_unseen_load_is_unknown_unless_already_loaded(tmp_path):
    folder, adapters = files(tmp_path / "a"), Adapters()
    adapters.unseen(lora(folder))
    files(folder, alpha=3)
    assert known(adapters, lora(folder)) is None
    other = lora(files(tmp_path / "b"), "other", 2)
    before = loaded(adapters, other)
    adapters.unseen(other)
    assert known(adapters, other) == before is not None, "the workers had it"


def test_load_on_hung_file_system_returns_and_is_unknown(tmp_path, monkeypatch):
    request, adapters, goes_on = lora(files(tmp_path / "a")), Adapters(), threading.Event()
    monkeypatch.setattr(adapters_module, "_find", lambda path: goes_on.wait(60))
    monkeypatch.setattr(adapters_module, "LOOK_SECONDS", 0.0)
    assert adapters.load(request, lambda: not goes_on.is_set()), "vLLM's workers may wait for it"
    goes_on.set()
    assert adapters.current(request) is None


@pytest.mark.parametrize("part", ["_identity", "_find", "_take"])
def test_load_internal_error_is_logged_and_not_raised(tmp_path, monkeypatch, part, caplog):
    adapters, request = Adapters(), lora(files(tmp_path / "a"))
    assert loaded(adapters, lora(files(tmp_path / "b"), "b", 2))
    if part == "_take":
        monkeypatch.setattr(adapters, part, lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(adapters_module, part, lambda *_: 1 / 0)
    assert adapters.load(request, lambda: "loaded") == "loaded"
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert adapters.admit(request) is None
    assert (adapters.admit(lora(tmp_path / "b", "b", 2)) is None) is (part != "_find"), "all are lost"


def test_load_of_path_with_unknown_user_is_left_to_vllm():
    adapters, request = Adapters(), lora("~no-such-user/adapter")
    assert adapters.load(request, lambda: 7) == 7 and known(adapters, request) is None


def test_adapters_with_unknown_vllm_hashing_are_not_shared(tmp_path, monkeypatch):
    folder, adapters = files(tmp_path / "a"), Adapters()
    assert loaded(adapters, lora(folder))
    features.clear()
    monkeypatch.delattr(adapters_module.kv_cache_utils, "_gen_lora_extra_hash_keys")
    assert not features.granted(features.Feature.ADAPTERS)
    assert adapters.admit(lora(folder)) is None and adapters.current(lora(folder)) is None
    assert adapters.load(lora(folder), lambda: 7) == 7
    monkeypatch.undo()
    features.clear()


def test_admit_file_written_during_read_is_unknown(tmp_path, monkeypatch):
    folder, adapters = files(tmp_path / "a"), Adapters()
    digests = adapters_module.file_digests

    def read(paths):
        found = digests(paths)
        files(folder, weights=b"later")
        return found

    monkeypatch.setattr(adapters_module, "file_digests", read)
    assert known(adapters, lora(folder)) is None


def test_admit_number_of_known_adapters_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(adapters_module, "MAX_ADAPTERS", 3)
    adapters = Adapters()
    found = [known(adapters, lora(files(tmp_path / f"{i}"), f"{i}", i + 1)) for i in range(5)]
    assert None not in found[:3] and found[3:] == [None, None] and len(adapters._known) == 3
    assert caplog.text.count("this engine had 3") == 1


def test_admit_adapter_that_is_loaded_again_and_again_stays_known(tmp_path, monkeypatch, caplog):
    """vLLM's server gives each load a number of its own: a month of loads and unloads has more than adapters."""
    monkeypatch.setattr(adapters_module, "MAX_ADAPTERS", 4)
    adapters = Adapters()
    folders = [files(tmp_path / str(i), alpha=i) for i in range(2)]
    for number in range(1, 20):
        assert loaded(adapters, lora(folders[number % 2], str(number % 2), number)) is not None, number
    assert len(adapters._numbers) <= 4 and "this engine had" not in caplog.text
    # What the workers have under a number that was removed is not known.
    assert known(adapters, lora(files(tmp_path / "other"), "other", 3)) is None
    assert loaded(adapters, lora(files(tmp_path / "third"), "third", 20)) is not None


def test_lora_fingerprint_of_admitted_request_is_stable(tmp_path, monkeypatch):
    """Its chain, its leases and its checksums go by it; one that waits may have another adapter when it comes."""
    monkeypatch.setattr(vr, "ADAPTERS", adapters := Adapters())
    folder = files(tmp_path / "a")
    request, waits = (SimpleNamespace(lora_request=lora(folder)) for _ in range(2))
    before = known(adapters, lora(folder))
    vr.keep_variant(request, before)
    assert vr.lora_fingerprint(waits) == before
    files(folder, alpha=2)
    adapters.load(lora(folder, inplace=True), lambda: True)
    after = known(adapters, lora(folder))
    assert vr.lora_fingerprint(request) == before and vr.lora_fingerprint(waits) == after not in (None, before)
    assert vr.lora_fingerprint(SimpleNamespace(lora_request=None)) == b""
    assert adapters.named("style")[1] == after and adapters.named("other") is None
