"""Every snippet of the documentation is one: nothing that a reader could copy is left unchecked.

Fences say what they hold. Blocks without a word behind the fence, and indented ones, are looked at paragraph by
paragraph: shell, a part of an engine's options, or one of the samples that are listed here. The guides' commands are
run by tests/engines/test_docs_engines.py.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from docs_blocks import ROOT, Block, blocks_of, commands_of, pages
from docs_commands import ENGINE_MODES, PLAIN, PREFIXES, Checker, refused

sys.path.insert(0, str(ROOT / "tools"))
import docs_kinds
import docs_options

SHELL = {"bash", "sh", "shell", "console"}
DOCUMENTS = {"json", "yaml", "toml"}
SAMPLES = {"text", "promql", "mermaid"}  # shown, not copied
FIRST_WORDS = {"curl", "kvtier", "make", "pip", "python", "vllm"} | PLAIN | PREFIXES
# Paragraphs of blocks without a word behind the fence that are output or pictures: their first words.
SHOWN = {
    "docs/kvtier-command.md": (
        "ok endpoint 127.0.0.1:7100:", "Qwen/Qwen3-8B: 36 layers", "Tokens that fit", "Loading beats computing",
        "mooncake_conversation_trace.jsonl.xz: 12,031", "x86_64, 2 cores",
    ),
    "docs/proxy.md": ("# clients.keys: a name",),
}  # fmt: skip
BLOCKS = [block for page in pages() for block in blocks_of(page)]


@pytest.fixture
def checker(tmp_path) -> Checker:
    return Checker(tmp_path)


def paragraphs(block: Block) -> list[str]:
    return [text for text in re.split(r"\n[ \t]*\n", block.text) if text.strip()]


def shown(page: str, text: str) -> str | None:
    """The entry in SHOWN that this paragraph is."""
    words = " ".join(text.split())
    return next((start for start in SHOWN.get(page, ()) if words.startswith(start)), None)


def check_block(block: Block, checker: Checker) -> None:
    if block.kind in SHELL:
        checker.script(block.text)
    elif block.kind in DOCUMENTS:
        checker.document(block.kind, block.text)
    elif block.kind == "python":
        check_python(block.text)
    elif block.kind == "":
        for text in paragraphs(block):
            check_paragraph(block, text, checker)
    else:
        assert block.kind in SAMPLES, f"no check knows blocks of the kind {block.kind!r}"


def check_paragraph(block: Block, text: str, checker: Checker) -> None:
    if shown(block.page, text) or "───" in text:  # a table that was printed
        return
    lines = text.splitlines()
    if all(line.startswith('"') for line in lines):  # options of an engine, as they stand in the object
        for line in lines:
            checker.options(json.loads("{" + re.sub(r"\s#.*", "", line) + "}"))
        return
    rest = []
    for line in lines:
        if line.startswith("... "):  # the end of an engine's command line
            match = re.match(r'\.\.\. "kv_connector_extra_config":(\{.*?\})\}?\'?\s*(#.*)?$', line)
            assert match, f"a part of what? {line!r}"
            checker.options(json.loads(match[1]))
        else:
            rest.append(line)
    commands = commands_of("\n".join(rest))
    for command in commands:
        assert command.words[0] in FIRST_WORDS, f"neither a command nor a sample that is listed: {text!r}"
        for name, content in command.files.items():
            checker.writes(name, content)
        checker.check(command)


def check_python(text: str) -> None:
    """It compiles, and what it imports of ours is there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_kvtier"):
            module = __import__(node.module, fromlist=["*"])
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_docs_snippets_are_valid(page, checker):
    wrong = []
    for block in BLOCKS:
        if block.page == page and (problem := refused(check_block, block, checker)):
            wrong.append(f"{block.where}: {problem}")
    assert not wrong, "\n".join(wrong)


def test_docs_inline_commands_are_valid(checker):
    """They need not be whole: options may be missing, and values."""
    whole = re.compile(r"Missing option|requires an argument|has no decode engine")
    commands = re.compile(r"(?<!`)`((?:curl|kubectl|kvtier|make|pip|pytest|python) [^`<]+)`")
    wrong, checked = [], 0
    for page in pages():
        text = re.sub(r"^```.*?^```$|^    .*$", "", page.read_text("utf-8"), flags=re.M | re.S)
        for span in commands.findall(text):
            problem = refused(checker.script, " ".join(span.split()))
            checked += 1
            if problem and not whole.search(problem):
                wrong.append(f"{page.relative_to(ROOT)}: {span}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert checked > 20


def test_docs_name_the_mode_that_an_engine_route_needs():
    """Tests of the guides start all engines in it; a reader's has no such route without it."""
    checked = 0
    for block in BLOCKS:
        if block.kind in SHELL and any(f"{route}\n" in block.text for route in ENGINE_MODES):
            before = (ROOT / block.page).read_text("utf-8").splitlines()[: block.line]
            assert "VLLM_SERVER_DEV_MODE=1" in "\n".join(before), block.where
            checked += 1
    assert checked >= 6


def test_docs_index_lists_every_guide():
    index = (ROOT / "docs/README.md").read_text("utf-8")
    guides = sorted((ROOT / "docs/guides").glob("*.md"))
    assert len(guides) >= 10
    assert all(f"(guides/{guide.name})" in index for guide in guides)
    checked = [block for block in BLOCKS if block.kind in SHELL]
    assert {block.page for block in checked} >= {f"docs/guides/{guide.name}" for guide in guides}


def test_docs_listed_samples_exist():
    for page, starts in SHOWN.items():
        found = {shown(page, text) for block in BLOCKS if block.page == page for text in paragraphs(block)}
        assert found >= set(starts), f"{page} no longer has {set(starts) - found}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_links_resolve(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name) if name else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", other.read_text("utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{page.name}: {target}"


# -- how pages are written --------------------------------------------------------------------------------------------


def test_docs_readme_has_at_most_200_lines():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


# Generated from texts in the code.
OTHER_WORDS = {"vllm-versions.md"}
BANNED = re.compile(
    r"\b(hurr(?:y|ied)|patience|whereabouts|nearby|fates?|undo|loans?|lend|lends|lent|risen|whom|whoever|somebody|nobody"
    r"|told|heard|said|luck|teller|ledger|linger\w*|br(?:ing|ings|ought) up|c[oa]mes? up|below memory|set aside"
    r"|in words|all the same)\b",
    re.I,
)
ROLES = re.compile(r"\b[PD]s?\b(?!/D)")  # a prefill engine, a decode engine


def prose(page: Path) -> str:
    """What it says itself, line by line: without code, and without what links lead to."""

    def blank(match: re.Match) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"^```.*?^```$|^    .*$|`[^`]*`", blank, page.read_text("utf-8"), flags=re.M | re.S)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize(
    "page", [page for page in pages() if page.name not in OTHER_WORDS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_docs_prose_has_no_banned_word(page):
    found = []
    for number, line in enumerate(prose(page).splitlines(), 1):
        words = BANNED.findall(line)
        if (ROOT / "docs") in page.parents and page.name != "performance.md":  # its tables have the short names
            words += ROLES.findall(line)
        found += [f"{page.relative_to(ROOT)}:{number}: {word}" for word in words]
    assert not found, "\n".join(found)


VLLMS = ("/", ".", "tests/v1/")  # no files of this repository
FOLDERS = ("", "vllm_kvtier/", "vllm_kvtier/store/", "vllm_kvtier/store/eviction/", "vllm_kvtier/scheduler/", "tests/")


def test_docs_named_files_exist():
    """In ``test_dist.py``: CONTRIBUTING's."""
    missing, checked = [], 0
    for page in pages():
        if page.name == "CONTRIBUTING.md":
            continue
        for span in re.findall(r"`([\w./-]+(?:\.py|\.md|\.yml|\.json|/))`", page.read_text("utf-8")):
            if "/" in span.rstrip("/") and not span.startswith(VLLMS):
                checked += 1
                results = (f"benchmarks/{span}", f"benchmarks/results/{span}")
                if not any((ROOT / name).exists() for name in (*(folder + span for folder in FOLDERS), *results)):
                    missing.append(f"{page.relative_to(ROOT)}: {span}")
    assert not missing, "\n".join(missing)
    assert checked > 50


# -- what pages say of options and messages ---------------------------------------------------------------------------


def test_docs_options_page_is_current():
    assert docs_options.PAGE.read_text("utf-8") == docs_options.page(), "run `make docs`"


def test_docs_cache_kinds_page_is_current():
    assert docs_kinds.PAGE.read_text("utf-8") == docs_kinds.page(), "run `make docs`"


def test_docs_options_page_has_every_option():
    from vllm_kvtier.config import KVTierConfig
    from vllm_kvtier.proxy.config import ProxyConfig
    from vllm_kvtier.store.options import StoreOptions

    table = docs_options.page()
    store = [f"--{name.replace('_', '-')}" for name in StoreOptions.__dataclass_fields__]
    proxy = set(ProxyConfig.__struct_fields__) - {"prefill", "decode", "pooling"}
    for name in [*KVTierConfig.__struct_fields__, *store, *proxy]:
        rows = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
        assert rows and all(len(row.rstrip(" |").rpartition("|")[2].strip()) > 10 for row in rows), name


def test_docs_options_page_maps_engine_options_to_store_flags():
    from vllm_kvtier.config import KVTierConfig
    from vllm_kvtier.scheduler.sources.node_store import _store_options
    from vllm_kvtier.store.options import StoreOptions

    rows = re.findall(r"^\| `--([\w-]+)` \|.*?\| `[^|]*` \| (?:`(\w+)`)? ?\|", docs_options.store_table(), re.M)
    assert len(rows) == len(StoreOptions.__dataclass_fields__)
    for flag, option in rows:
        name = flag.replace("-", "_")
        if not option or option == "cluster_key_file":
            continue
        default = getattr(KVTierConfig(), option)
        other = {bool: True, int: 17, float: 0.625, str: "64MiB"}[type(default)]
        if choices := StoreOptions.__dataclass_fields__[name].metadata["choices"]:
            other = next(choice for choice in choices if choice != default)
        addresses = {"store_nodes": "127.0.0.1:7", "store_node_listen": "127.0.0.1:7"}
        urls = {"store_object_url": "s3://abc/d", "store_object_endpoint": "http://a"}
        mooncake = {"store_mooncake_master": "127.0.0.1:7", "store_mooncake_replicas": 3}
        other = (addresses | urls | mooncake | {"store_disk_path": "/tmp/a"}).get(option, other)
        passed = _store_options(KVTierConfig(**{"store_mooncake_trusted_network": True, option: other}))
        assert getattr(passed, name) == other, option


def source_text() -> str:
    """The package's, with strings that go on in the next line put together."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "vllm_kvtier").rglob("*.py"))]
    return re.sub(r"[\"']\s*\n\s*f?[\"']", "", "\n".join(texts))


def test_messages_quoted_in_guides_exist_in_code():
    source, checked = source_text(), 0
    for page in sorted((ROOT / "docs/guides").glob("*.md")):
        for text in re.findall(r"^\|.*", page.read_text("utf-8"), re.M):
            for span in re.findall(r"`([^`]+)`", text.split("|")[1]):
                if len(span.split()) < 5 or span == "hostPath volumes are not allowed":  # that is Kubernetes' own
                    continue
                parts = [part.strip(" ():;") for part in re.split(r"\.\.\.", span) if part.strip(" ():;")]
                checked += 1
                for part in parts:
                    assert part in source, f"{page.name}: not in the source: {part!r}"
    assert checked >= 10


def test_docs_list_every_option_of_vllm_connectors():
    """As far as the vLLM that is here has them."""
    import vllm

    v1 = Path(vllm.__file__).parent / "distributed/kv_transfer/kv_connector/v1"
    nixl, offloading = [*v1.glob("nixl*/*.py"), *v1.glob("nixl*.py")], [*v1.glob("offloading*/*.py")]
    offloading += [*v1.glob("offloading*.py"), *(v1.parents[3] / "v1/kv_offload").glob("**/spec.py")]
    offloading += [v1.parents[3] / "v1/kv_offload/base.py", v1.parents[3] / "v1/kv_offload/factory.py"]
    offloading.append(v1 / "simple_cpu_offload_connector.py")
    read = r"(?:get_from_extra_config|extra_config\.get)\(\s*\"(\w+)\""
    for name, files in (("nixlconnector", nixl), ("offloadingconnector", offloading)):
        page = (ROOT / f"docs/guides/from-{name}.md").read_text("utf-8")
        options = {option for file in files if file.exists() for option in re.findall(read, file.read_text("utf-8"))}
        assert len(options) >= 7, options
        assert not (missing := {option for option in options if f"`{option}`" not in page}), missing


def test_docs_options_in_guides_exist():
    from vllm_kvtier.config import KVTierConfig
    from vllm_kvtier.store.options import StoreOptions

    ours = set(KVTierConfig.__struct_fields__) | {f"--{n.replace('_', '-')}" for n in StoreOptions.__dataclass_fields__}
    for page in sorted((ROOT / "docs/guides").glob("from-*.md")):
        for row in re.findall(r"^\| .*", page.read_text("utf-8"), re.M):
            cells = row.split("|")
            for option in re.findall(r"`(--[a-z-]+|[a-z]+_[a-z_]+)`", cells[2]):
                allowed = option in ours or (option.startswith("--") and "vLLM's" in cells[2]) or option == "--socket"
                allowed |= option == "kv_connector_extra_config"
                assert allowed or f"`{option}`" in cells[1], f"{page.name}: {option}"


# -- the checks find what is wrong --------------------------------------------------------------------------------


WRONG = [
    ("bash", "vllm serve MODEL --prot 8000", "--prot"),
    ("bash", 'vllm serve MODEL --kv-transfer-config \'{"kv_connector":"KVTierConnector"}\'', "kv_role"),
    ("bash", "kvtier stores", "no command"),
    ("bash", "kvtier store --sise 1GiB", "--sise"),
    ("bash", "kvtier store --disk-admission some", "disk_admission"),
    ("bash", "kvtier proxy --prefill http://127.0.0.1:1", "no decode engine"),
    ("bash", "kvtier proxy --decode http://127.0.0.1:1/v1", "must end before /v1"),
    ("bash", "python examples/nothing.py", "no examples/nothing.py"),
    ("bash", "python examples/disagg_proxy.py --prot 1", "--prot"),
    ("bash", "python -m vllm_kvtier.nothing", "no module"),
    ("bash", "pip install '.[cuba]'", "cuba"),
    ("bash", "make tset", "tset"),
    ("bash", "make test LEVLES=unit", "LEVLES"),
    ("bash", "pytest tests/unit/test_nothing.py", "no tests/unit"),
    ("bash", "curl http://127.0.0.1:8000/v1/complete", "/v1/complete"),
    ("bash", "curl http://127.0.0.1:8000/v1/completions -d '{\"model\": }'", "value"),
    ("bash", "kubectl -n kvtire get pods", "kvtire"),
    ("bash", "kubectl -n kvtier logs deploy/router", "deploy/router"),
    ("bash", "kubectl -n kvtier exec ds/store -- kvtier stat", "no command"),
    ("bash", "docker build -f examples/kubernetes/Dockerfile --target router .", "router"),
    ("bash", "frobnicate", "frobnicate"),
    ("bash", "kvtier stats '", "quote"),
    ("json", '{"kv_connector":"KVTierConnector","kv_role":"kv_both","kv_connector_extra_config":{"stor":1}}', "stor"),
    ("yaml", "engines: [{role: decode, url: 'http://a:1', wait: 2}]", "wait"),
    ("yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {prots: []}", "prots"),
    ("yaml", "a: [", "a"),
    ("python", "from vllm_kvtier.config import KVTireConfig", "KVTireConfig"),
    ("rust", "fn main() {}", "rust"),
    ("", "total 12,345", "neither a command"),
    ("", '"store_sise":"1GiB"', "store_size"),
    ("", '... "kv_connector_extra_config":{"codec":7}}\'', "codec"),
]


@pytest.mark.parametrize(("kind", "text", "word"), WRONG, ids=range(len(WRONG)))
def test_docs_checker_finds_errors(kind, text, word, checker):
    problem = refused(check_block, Block("README.md", 1, kind, text + "\n"), checker)
    assert word in problem, problem or "nothing was found"


def test_docs_commands_are_split_like_a_shell():
    script = "A=1 b 'c\nd' \\\n e # it's\ncat > f.txt <<'EOF'\nx 'y\nEOF\ng | h && i > j 2>&1; k &\n"
    found = commands_of(script)
    assert [command.words for command in found] == [["b", "c\nd", "e"], ["cat"], ["g"], ["h"], ["i"], ["k"]]
    assert found[0].variables == {"A": "1"} and found[1].files == {"f.txt": "x 'y\n"} and found[4].files == {"j": None}
    assert found[5].background
