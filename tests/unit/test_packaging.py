"""The package as users get it: wheel, editable install and source archive, each built and used here."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import vllm_kvtier


@pytest.fixture(scope="module")
def build(root, tmp_path_factory):
    """Builds a kind of archive from a copy of the tree, because setuptools leaves files behind."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(root, tree, ignore=unwanted)

    (stale := tree / "build" / "lib" / "vllm_kvtier" / "removed.py").parent.mkdir(parents=True)
    stale.touch()  # as pip leaves it; each file of a wheel must be in the tree

    def build(kind: str) -> Path:
        out = tmp_path_factory.mktemp(kind)
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return out / done.stdout.split()[-1]

    build.tree = tree
    return build


@pytest.fixture(scope="module")
def wheel(build) -> zipfile.ZipFile:
    with zipfile.ZipFile(build("wheel")) as archive:
        yield archive


def isolated(site: Path, code: str, cwd: Path) -> str:
    """Run code with ``site`` as the only site directory, .pth files included."""
    setup = f"import site; site.addsitedir({str(site)!r}); "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", setup + code], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# The kernels need torch to import, which an isolated interpreter lacks: whether they are found is enough.
WHERE = (
    "import vllm_kvtier, importlib.util as u; "
    "print(vllm_kvtier.__file__, u.find_spec('vllm_kvtier.kernels').origin, "
    "u.find_spec('vllm_kvtier.plugin').origin, sep='\\n')"
)


def test_wheel_contains_package_and_kernels_only(wheel, root):
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {
        "vllm_kvtier",
        f"vllm_kvtier-{vllm_kvtier.__version__}.dist-info",
    }
    sources = [path for path in (root / "csrc_triton").rglob("*.py")]
    assert sources
    for path in sources:
        assert f"vllm_kvtier/kernels/{path.relative_to(root / 'csrc_triton')}" in names
    for path in (root / "vllm_kvtier").rglob("*.py"):
        assert str(path.relative_to(root)) in names, "a package without __init__.py?"
    assert "vllm_kvtier/py.typed" in names and "vllm_kvtier/removed.py" not in names
    assert [name for name in names if name.endswith("/LICENSE")]


def test_wheel_install_imports_and_runs(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    package, kernels, plugin = isolated(tmp_path / "site", WHERE, tmp_path).split()
    base = tmp_path / "site" / "vllm_kvtier"
    assert (package, kernels, plugin) == tuple(
        str(base / name) for name in ("__init__.py", "kernels/__init__.py", "plugin.py")
    )


def test_editable_install_imports_and_runs(build, tmp_path):
    with zipfile.ZipFile(build("editable")) as archive:
        archive.extractall(tmp_path / "site")
    found = isolated(tmp_path / "site", WHERE, tmp_path).split()
    assert found == [
        str(build.tree / name)
        for name in ("vllm_kvtier/__init__.py", "csrc_triton/__init__.py", "vllm_kvtier/plugin.py")
    ]
    # The tree itself as working directory, as in `make test`, must not hide the kernels.
    in_tree = f"import sys; sys.path.insert(0, ''); {WHERE}"
    assert isolated(tmp_path / "site", in_tree, build.tree).split()[1] == found[1]


def test_package_metadata_is_complete(wheel):
    info = f"vllm_kvtier-{vllm_kvtier.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert re.search(r"^Name: vllm[-_]kvtier$", metadata, re.M)
    assert "\nAuthor: The vllm-kvtier authors\n" in metadata
    assert re.search(r"^License(-Expression)?: Apache-2\.0$", metadata, re.M)
    assert f"\nVersion: {vllm_kvtier.__version__}\n" in metadata
    requires = re.findall(r"^Requires-Dist: (.+)$", metadata, re.M)
    hard = {re.match(r"[\w-]+", line)[0] for line in requires if "extra ==" not in line}
    assert hard == {"msgspec", "numpy", "pyzmq", "prometheus-client"}
    assert set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.M)) >= {"cuda", "cpu", "proxy", "test"}
    assert not [line for line in requires if re.match(r"(vllm|torch)\b(?!-)", line)], "the user's choice"
    points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "[vllm.general_plugins]\nkvtier = vllm_kvtier.plugin:register" in points


def test_sdist_contains_sources_of_the_wheel(build, wheel, tmp_path):
    with tarfile.open(build("sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    papers = ("LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/options.md")
    tools = ("setup.py", "Makefile", "mypy.ini", "ruff.toml", "benchmarks/pd.py")
    for needed in ("csrc_triton/__init__.py", "models/recall-6m/config.json", *tools, *papers):
        assert needed in names
    kernels = {n.replace("vllm_kvtier/kernels", "csrc_triton") for n in wheel.namelist() if "/kernels/" in n}
    assert kernels <= names
    assert not [name for name in names if "__pycache__" in name]


def test_shipped_files_name_no_registry_host_or_machine_path(root):
    """Where packages come from is for pip's configuration to say, and paths differ between machines."""
    shipped = [root / name for name in ("setup.py", "Makefile", ".ci/run", "MANIFEST.in")]
    for folder in ("vllm_kvtier", "csrc_triton", "tools", "examples", "benchmarks"):
        shipped += (root / folder).rglob("*.py")
    hosts = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|wheels\.vllm|/work/|/root/|/home/\w")
    for path in shipped:
        assert not hosts.search(path.read_text("utf-8")), path
