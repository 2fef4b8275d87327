"""Registration with vLLM, and the one sentence where there is no vLLM to register with."""

import importlib.metadata
import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest

from vllm_kvtier import plugin
from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.vllm_compat import version
from vllm_kvtier.vllm_compat.hooks import mm_embeddings, replaced_connector

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class Factory:
    """As vLLM's: a duplicate name raises ValueError."""

    def __init__(self):
        self.registered = {}
        self.hooked = []

    def register_connector(self, name, module_path, class_name):
        if name in self.registered:
            raise ValueError(f"Connector '{name}' is already registered.")
        self.registered[name] = (module_path, class_name)


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in vLLM of a version to choose, and the factory that it has."""

    def install(release: str | None, with_factory: bool = True) -> Factory:
        factory = Factory()
        for hook in (mm_embeddings, replaced_connector):
            monkeypatch.setattr(hook, "install", lambda: factory.hooked.append(release))
        monkeypatch.setattr(version, "installed_version", lambda: release)
        module = types.ModuleType(FACTORY)
        if with_factory:
            module.KVConnectorFactory = factory
        for name in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, FACTORY.rpartition(".")[0], types.ModuleType("kv_connector"))
        monkeypatch.setitem(sys.modules, FACTORY, module)
        return factory

    return install


@pytest.fixture
def warnings(caplog, monkeypatch):
    """The warnings logged so far; vLLM's own logger may have switched propagation off."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("WARNING")
    return lambda: [record.getMessage() for record in caplog.records]


NEWER = ["0.34.0", "1.0.0", "0.34.0rc1", "0.1.dev12+g1234", "0.0.0.dev0", "dev", "unknown"]


@pytest.mark.parametrize("release", ["0.25.1", "0.32.0", "0.33.0", "0.33.2.dev7+g1234.cpu", *NEWER])
def test_plugin_registers_connector_once(vllm, warnings, release):
    factory = vllm(release)
    plugin.register()
    plugin.register()
    assert factory.registered == {"KVTierConnector": ("vllm_kvtier.connector", "KVTierConnector")}
    assert factory.hooked == [release] * 4, "two hooks, each installed twice"
    assert warnings() == []


@pytest.mark.parametrize("release", ["0.25.0", "0.24.2", "0.1.0", None])
def test_plugin_with_unsupported_vllm_warns_once(vllm, warnings, release):
    factory = vllm(release)
    plugin.register()
    assert factory.registered == {} and factory.hooked == []
    assert len(warnings()) == 1
    assert "0.25.1 to 0.33" in warnings()[0] and "\n" not in warnings()[0]
    assert (release or "no vLLM is installed") in warnings()[0]


def test_plugin_without_connector_factory_warns(vllm, warnings):
    vllm("0.33.0", with_factory=False)
    plugin.register()
    assert len(warnings()) == 1 and "not registered" in warnings()[0]


def test_check_supported_of_old_vllm_raises(monkeypatch):
    monkeypatch.setattr(version, "installed_version", lambda: "0.25.0")
    with pytest.raises(UnsupportedVLLM, match="this is vLLM 0.25.0"):
        version.check_supported()
    monkeypatch.setattr(version, "installed_version", lambda: "0.33.1")
    assert version.check_supported() == (0, 33, 1)


@pytest.mark.parametrize("release", NEWER)
def test_check_supported_of_newer_or_unknown_build_is_untested(monkeypatch, release):
    monkeypatch.setattr(version, "installed_version", lambda: release)
    found = version.check_supported()
    assert found > version.NEWEST_TESTED and not version.is_tested(found)


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.32.0", (0, 32, 0)), ("0.33", (0, 33, 0)), ("v0.33.1rc2+cpu", (0, 33, 1)), ("0.1.dev7+g1", None), ("", None)],
)
def test_plugin_parses_vllm_release(text, release):
    assert version.parse_release(text) == release


def ask(code: str, cwd: Path, *paths: Path) -> str:
    """Run code in a fresh interpreter that has this package and ``paths``, and not the site's packages."""
    package = Path(plugin.__file__).parents[1]
    setup = f"import sys; sys.path[:0] = {[str(p) for p in (*paths, package)]!r}; "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", setup + code], capture_output=True, text=True, cwd=cwd, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOW = "from vllm_kvtier.vllm_compat.version import installed_version; print(installed_version()); "


def test_plugin_without_vllm_does_nothing(tmp_path):
    assert ask(SHOW, tmp_path) == "None"


def test_installed_version_ignores_folder_named_vllm(tmp_path):
    (tmp_path / "vllm").mkdir()
    assert ask(SHOW, tmp_path, tmp_path) == "None"


@pytest.mark.parametrize("line", ["__version__ = version = '0.33.0'", '__version__ = "0.33.0"'])
def test_installed_version_is_read_without_import(tmp_path, line):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('vLLM was imported')")
    (package / "_version.py").write_text(f"version: str\n__version__: str\n{line}\n")
    assert ask(SHOW + "assert 'vllm' not in sys.modules", tmp_path, tmp_path) == "0.33.0"


@pytest.mark.parametrize("distribution", version.DISTRIBUTIONS)
def test_installed_version_is_read_from_distribution(tmp_path, distribution):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    info = tmp_path / f"{distribution.replace('-', '_')}-0.31.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.31.0\n")
    assert ask(SHOW, tmp_path, tmp_path) == "0.31.0"


def test_installed_vllm_is_supported():
    """Where vLLM is installed (the set-up of this project does), the real thing agrees with its metadata."""
    found = version.installed_version()
    if found is None:
        pytest.skip("no vLLM here")
    assert version.check_supported() == (version.parse_release(found) or version.UNKNOWN)


def test_plugin_entry_point_is_declared():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [point.value for point in points if point.name == "kvtier"] == ["vllm_kvtier.plugin:register"]
