"""Code blocks of Markdown pages, and shell text split into commands."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    """``kind``: what stands behind the fence; "" without, and for indented blocks."""

    page: str  # path within the source tree
    line: int  # of its first line, from 1
    kind: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages(root: Path = ROOT) -> list[Path]:
    """All that users read."""
    papers = [root / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*papers, *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("examples/**/README.md"))]


def blocks_of(page: Path, root: Path = ROOT) -> list[Block]:
    """Fenced and indented ones, in order, also those within lists and quotes."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8")):
        if token.type in ("fence", "code_block"):
            first = token.map[0] + (2 if token.type == "fence" else 1)
            kind = token.info.split()[0].lower() if token.info.split() else ""
            found.append(Block(str(page.relative_to(root)), first, kind, token.content))
    return found


@dataclass
class Command:
    """One simple command of a shell script. ``files``: what it writes to, by name, with its text if a here-document
    says that. ``text``: the lines that it stands in."""

    words: list[str]
    text: str
    files: dict[str, str | None] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)  # set for it alone, or, without words, from there on
    background: bool = False


def commands_of(script: str) -> list[Command]:
    """What a shell would run, in order. Control structures are not known; here-documents, pipes and lists are.

    Raises ValueError where a quote or a here-document does not end.
    """
    commands: list[Command] = []
    at = 0
    while at < len(script):
        line, end = _logical_line(script, at)
        text, here = script[at:end], None
        if match := re.search(r"<<\s*(['\"]?)(\w+)\1", line):
            stop = re.compile(rf"^{match[2]}$\n?", re.M).search(script, end)
            if stop is None:
                raise ValueError(f"here-document {match[2]} does not end")
            here, text = script[end : stop.start()], script[at : stop.end()]
            line, end = line[: match.start()] + line[match.end() :], stop.end()
        commands += _split(line, text, here)
        at = end
    return commands


def _logical_line(script: str, at: int) -> tuple[str, int]:
    """The line that begins there, to where the shell ends it, without its comment; and where the next one begins."""
    out, quote = [], ""
    while at < len(script):
        char = script[at]
        if char == "\\" and quote != "'":
            out.append(" " if script[at + 1 : at + 2] == "\n" else script[at : at + 2])
            at += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "\n":
            return "".join(out), at + 1
        elif char == "#" and (not out or out[-1].isspace()):
            at = script.find("\n", at) if "\n" in script[at:] else len(script)
            continue
        out.append(char)
        at += 1
    if quote:
        raise ValueError(f"a quote does not end: {''.join(out)!r}")
    return "".join(out), at


def _split(line: str, text: str, here: str | None) -> list[Command]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>()")
    lexer.whitespace_split, lexer.commenters = True, ""
    commands, current, target = [], Command([], text), ""
    for word in lexer:
        if target:
            if target.startswith(">") and not re.fullmatch(r"\d|/dev/null", word):
                current.files[word] = here
            target = ""
        elif word in (">", ">>", "<", ">&", "&>"):
            if current.words and current.words[-1] in ("1", "2"):  # of the descriptor that is redirected
                current.words.pop()
            target = word
        elif word and set(word) <= set(";|&()"):
            current.background = word == "&"
            commands.append(current)
            current = Command([], text)
        elif not current.words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.S)):
            current.variables[match[1]] = match[2]
        else:
            current.words.append(word)
    return [command for command in [*commands, current] if command.words or command.variables]
