"""Models and their weights on disk, for fingerprints."""

import time

from engine_configs import engine_config

from vllm_kvtier.vllm_compat import namespace as ns


def model(folder, load_format: str = "auto", **more):
    return engine_config(model=str(folder), load={"load_format": load_format}, **more)


def weights_folder(tmp_path, monkeypatch):
    """A folder with weights, which vLLM loads later than anything that the test does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(10_000))
    monkeypatch.setattr(ns, "process_start", lambda: 1 << 62)
    return tmp_path / "model"


def starts_now(monkeypatch) -> int:
    """This process, between all that was written and all that is to be, by the clock of the file system."""
    time.sleep(0.02)  # it ticks every 10 ms, or more often
    moment = time.time_ns()
    monkeypatch.setattr(ns, "process_start", lambda: moment)
    time.sleep(0.02)
    return moment
