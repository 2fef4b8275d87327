"""LoRA adapters are told apart by what the engine has loaded of them; what is not known to be equal is not shared."""

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import eventually
from vllm.lora.request import LoRARequest

from vllm_kvtier.vllm_compat import adapters as adapters_module
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import Adapters


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def files(folder: Path, alpha: int = 16, weights: bytes = b"w" * 5000, name: str = "adapter_model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
    (folder / name).write_bytes(weights)
    return folder


def lora(folder: Path | str, name: str = "style", number: int = 1, inplace: bool = False) -> LoRARequest:
    return LoRARequest(name, number, str(folder), load_inplace=inplace)


def known(adapters: Adapters, request: LoRARequest) -> bytes | None:
    """When its files have been read."""
    adapters.fingerprint(request)
    eventually(lambda: not adapters.awaited(request))
    return adapters.fingerprint(request)


def fresh(folder: Path | str) -> bytes | None:
    """As another engine knows it."""
    return known(Adapters(), lora(folder))


def loaded(adapters: Adapters, request: LoRARequest) -> bytes | None:
    """As by vLLM's ``add_lora``."""
    assert adapters.load(request, lambda: True) is True
    return known(adapters, request)


def test_fingerprint_equal_files_in_another_folder_are_the_same_adapter(tmp_path):
    one, copy = files(tmp_path / "a"), tmp_path / "b"
    shutil.copytree(one, copy)
    assert fresh(one) == fresh(copy) is not None


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"])
def test_fingerprint_another_weight_or_configuration_is_another_adapter(tmp_path, name):
    """Weights in a .bin, and lora_alpha, which stands in the configuration only, were not looked at."""
    variants = [
        files(tmp_path / "a", name=name),
        files(tmp_path / "b", name=name, weights=b"w" * 4999 + b"x"),
        files(tmp_path / "c", name=name, alpha=32),
    ]
    (files(tmp_path / "d", name=name) / "new_embeddings.bin").write_bytes(b"e")
    found = [fresh(folder) for folder in [*variants, tmp_path / "d"]]
    assert None not in found and len(set(found)) == 4


def test_fingerprint_of_what_cannot_be_read_is_none(tmp_path, caplog):
    """Folders that are not there, hub names among them, and folders without weights once had one fingerprint."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "config only").mkdir()
    (tmp_path / "config only" / "adapter_config.json").write_text("{}")
    for folder in ("nobody/has-this-adapter", tmp_path / "absent", "~/absent", empty, tmp_path / "config only"):
        adapters = Adapters()
        caplog.clear()
        assert [known(adapters, lora(folder)) for _ in range(3)] == [None] * 3
        assert loaded(adapters, lora(folder, number=2)) is None
        assert "neither shared nor stored" in caplog.text


def test_fingerprint_of_a_hub_s_adapter_is_known_once_the_engine_has_loaded_it(tmp_path, monkeypatch):
    """Which revision it loads is not known before: vLLM asks the hub each time."""
    snapshot, adapters = files(tmp_path / "snapshot"), Adapters()
    monkeypatch.setattr(adapters_module, "model_folder", lambda name: snapshot if name == "org/adapter" else None)
    assert known(adapters, lora("org/adapter")) is None
    adapters = Adapters()
    assert loaded(adapters, lora("org/adapter")) == fresh(snapshot) is not None


def test_fingerprint_files_changed_behind_the_engine_s_back_share_nothing_until_it_loads_them(tmp_path, caplog):
    folder, adapters = files(tmp_path / "a"), Adapters()
    before = loaded(adapters, lora(folder))
    state = (folder / "adapter_model.safetensors").stat()
    files(folder, weights=b"v" * 5000)
    os.utime(folder / "adapter_model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))  # as rsync does
    assert known(adapters, lora(folder)) is None and "load it again" in caplog.text
    adapters.cache_is_empty()
    assert known(adapters, lora(folder)) is None, "the engine may have either, whatever its cache holds"
    assert loaded(adapters, lora(folder)) is None, "vLLM does not load what it has"
    assert loaded(adapters, lora(folder, inplace=True)) is None, "vLLM's cache has KV of the old one under its name"
    adapters.cache_is_empty()
    after = known(adapters, lora(folder, inplace=True))
    assert after == fresh(folder) and after not in (None, before)


def test_fingerprint_loaded_in_place_running_requests_are_told_of(tmp_path):
    folder, adapters, told = files(tmp_path / "a"), Adapters(), []
    listener = type("Listener", (), {"adapter_replaced": lambda self, number: told.append(number)})()
    adapters.listeners.add(listener)
    loaded(adapters, lora(folder, number=7))
    loaded(adapters, lora(folder, number=7, inplace=True))
    assert not told, "the same files"
    loaded(adapters, lora(files(tmp_path / "b", alpha=64), number=7, inplace=True))
    assert told == [7]
    files(folder, weights=b"another")
    loaded(adapters, lora(folder, "other", 8))
    assert told == [7], "nobody had loaded that one"


def test_fingerprint_the_same_files_loaded_anew_stay_shared(tmp_path):
    folder, adapters = files(tmp_path / "a"), Adapters()
    before = loaded(adapters, lora(folder))
    assert loaded(adapters, lora(folder, number=2)) == loaded(adapters, lora(folder, number=2, inplace=True)) == before


def test_fingerprint_another_path_under_a_loaded_number_is_not_known(tmp_path):
    """vLLM goes by the number: it loads the path only if it has forgotten the other."""
    one, two, adapters = files(tmp_path / "a"), files(tmp_path / "b", alpha=1), Adapters()
    loaded(adapters, lora(one))
    assert loaded(adapters, lora(two)) is None
    adapters.cache_is_empty()
    assert known(adapters, lora(two)) is None


def test_fingerprint_files_that_change_while_they_are_loaded_are_not_known(tmp_path):
    folder, adapters = files(tmp_path / "a"), Adapters()
    adapters.load(lora(folder), lambda: files(folder, weights=b"changed"))
    assert known(adapters, lora(folder)) is None
    adapters = Adapters()
    with pytest.raises(ValueError):
        adapters.load(lora(folder), lambda: int("no such adapter"))


def test_fingerprint_slow_files_are_awaited_for_a_moment_by_none_but_their_requests(tmp_path, monkeypatch):
    may_read = threading.Event()
    digests = adapters_module.file_digests
    monkeypatch.setattr(adapters_module, "file_digests", lambda files: may_read.wait(60) and digests(files))
    adapters, request = Adapters(), lora(files(tmp_path / "a"))
    assert adapters.fingerprint(request) is None and adapters.awaited(request), "the engine's thread goes on"
    monkeypatch.setattr(adapters_module, "READ_SECONDS", 0.0)
    assert not adapters.awaited(request), "it is computed"
    may_read.set()
    assert eventually(lambda: adapters.fingerprint(request))


def test_fingerprint_a_file_written_to_while_it_is_read_is_not_known(tmp_path, monkeypatch):
    folder, adapters = files(tmp_path / "a"), Adapters()
    digests = adapters_module.file_digests

    def read(paths):
        found = digests(paths)
        files(folder, weights=b"later")
        return found

    monkeypatch.setattr(adapters_module, "file_digests", read)
    assert known(adapters, lora(folder)) is None


def test_fingerprint_adapters_without_end_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters_module, "MOST", 3)
    adapters = Adapters()
    found = [known(adapters, lora(files(tmp_path / f"{i}"), f"{i}", i + 1)) for i in range(5)]
    assert None not in found[:3] and found[3:] == [None, None] and len(adapters._known) == 3


def test_variant_of_a_request_stays_what_it_was(tmp_path, monkeypatch):
    """Its chain, its leases and its checksums go by it."""
    monkeypatch.setattr(vr, "ADAPTERS", adapters := Adapters())
    folder = files(tmp_path / "a")
    request, later = (SimpleNamespace(lora_request=lora(folder)) for _ in range(2))
    before = eventually(lambda: vr.variant(request))
    files(folder, alpha=2)
    assert vr.variant(request) == before and vr.variant(later) is None
    assert vr.variant(SimpleNamespace(lora_request=None)) == b""
    assert adapters.named("style")[1] == before and adapters.named("other") is None
