"""MkDocs hooks: pages of the repository that lie outside docs/ are pages of the site, and links to them work there.

In the repository, links are relative to the file that they stand in. The site's root is docs/, so that each link is
resolved in the repository first. A link to a file that is no page of the site loses its target and keeps its text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "examples/grafana/README.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    folder = posixpath.dirname(here if here in PAGES else f"docs/{here}")

    def relink(match: re.Match) -> str:
        image, text, anchor = match[1], match[2], match[4] or ""
        target = posixpath.normpath(posixpath.join(folder, match[3]))
        if (ROOT / target).exists() and target not in PAGES and not target.startswith("docs/"):
            return text
        name = posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(here) or ".")
        return f"{image}[{text}]({name}{anchor})"

    # A word behind the language says what the tests do with a block.
    return re.sub(r"^(```\w+) \w+$", r"\1", LINK.sub(relink, markdown), flags=re.M)
