"""The documentation site: `make site` builds it, strictly, from pages that are all in its navigation."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="no mkdocs here: it comes with the extras docs and test")


def build(root: Path, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)


def copied(root: Path, folder: Path) -> Path:
    """A tree with what the site is made from."""
    for name in ("docs", "examples", "tools"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (root / "mkdocs.yml", *root.glob("*.md")):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def site(root, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(root, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_site_has_every_page_and_picture_of_docs(root, site):
    docs = root / "docs"
    for page in docs.rglob("*.md"):
        name = page.relative_to(docs).with_suffix(".html")
        assert (site / name.with_name("index.html" if name.name == "README.html" else name.name)).exists(), name
    assert all((site / path.name).exists() for path in docs.glob("*.png"))


def test_site_diagrams_are_rendered_by_browser(site):
    text = (site / "architecture.html").read_text("utf-8")
    assert text.count('<pre class="mermaid">') >= 3


def test_site_links_resolve(site):
    """Also those to pages outside docs/."""
    checked = 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links are absolute
            continue
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text("utf-8")):
            if not re.match(r"[a-z]+:|//", target):
                checked += 1
                assert (page.parent / target).exists(), f"{page.relative_to(site)}: {target}"
    assert checked > 500


FAULTS = {
    "docs/limits.md": ("\n[gone](nothing.md), [gone](security.md#not-there)\n", ["nothing.md", "not-there"]),
    "examples/README.md": ("\n![gone](../docs/nothing.png)\n", ["nothing.png"]),
    "docs/forgotten.md": ("# A page that is not in the navigation\n", ["forgotten.md"]),
}


def test_site_with_faults_is_refused(root, tmp_path):
    tree = copied(root, tmp_path / "tree")
    for name, (text, _) in FAULTS.items():
        with open(tree / name, "a", encoding="utf-8") as page:
            page.write(text)
    done = build(tree, tmp_path / "site")
    assert done.returncode != 0
    for name, (_, problems) in FAULTS.items():
        lines = [line for line in done.stderr.splitlines() if Path(name).name in line]
        assert all(any(problem in line for line in lines) for problem in problems), (name, done.stderr)
