"""Identifiers, names of tests, comments and strings use the field's words. The lists of what is left only shrink."""

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

BANNED = set("""
    chain company far fate fates further heard hurried hurry ledger lend lent linger loan luck mover nearby nobody
    patience risen said scales somebody sums teller told turns undo unit units whereabouts whoever whom
""".split())  # fmt: skip

# Names of other things (sockets, certificates, numbers), and public names that have aliases to come.
MAY_STAY = set("""
    LINGER _scales linger load_cert_chain prefix_match_unit scales
""".split())  # fmt: skip


# Verbs for the end of something, where CONTRIBUTING.md has another one.
OTHER_VERBS = re.compile(r"(^|_)(forget|forgot|forgotten|give_up|give_back|let_go|take_back)(_|$)")


def parts_of(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+", name)}


def names() -> set[str]:
    """All identifiers of the package and its kernels."""
    found = set()
    for path in [*(ROOT / "vllm_kvtier").rglob("*.py"), *(ROOT / "csrc_triton").glob("*.py")]:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
        found |= {token.string for token in tokens if token.type == tokenize.NAME}
    return found


def test_identifier_parts_are_split():
    assert parts_of("make_TierMover") == {"make", "tier", "mover"} and parts_of("MAX_UNITS2") == {"max", "units", "2"}


def test_identifiers_have_no_banned_word():
    found = {name for name in names() if parts_of(name) & BANNED}
    assert found - MAY_STAY == set(), "see CONTRIBUTING.md: the field's words"
    assert MAY_STAY - found == set(), "gone: take them off the list"


def test_identifiers_have_one_verb_per_meaning():
    assert {name for name in names() if OTHER_VERBS.search(name)} == set(), "see CONTRIBUTING.md: verbs"


# -- names of tests ------------------------------------------------------------------------------------------------

# Units of measure, scales of numbers, turns of conversations and the like, by their other meaning.
TEST_NAMES_MAY_STAY = set("""
    test_calibrated_scales_make_namespace_private test_demo_accepts_turns_below_pull_threshold
    test_encode_twice_with_power_of_two_scales_is_stable test_promotion_timeout_leases_blocks_promoted_so_far
    test_quality_bits_include_scales
    test_serve_counts_turns_with_cached_history test_serve_rate_sends_turns_in_order
""".split())  # fmt: skip


def names_of_tests() -> set[str]:
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text("utf-8"), re.M))
    return found


def test_names_of_tests_have_no_banned_word():
    found = {name for name in names_of_tests() if parts_of(name) & (BANNED | {"who"})}
    assert found - TEST_NAMES_MAY_STAY == set(), "see CONTRIBUTING.md: the field's words"


def test_names_of_tests_begin_with_what_is_tested():
    """test_<unit>_<condition>_<result>, at most 90 characters."""
    sentence = re.compile(r"test_(a|an|the|what|whatever|nothing|of|in|it|they|how)_")
    assert [name for name in sorted(names_of_tests()) if sentence.match(name) or len(name) > 90] == []


# -- comments and strings ------------------------------------------------------------------------------------------

PROSE = re.compile(
    r"\b(nobody|somebody|everybody|anybody|whoever|whom|who|told|heard|said|lends?|lending|lent|loans?|luck|patience|hurry"
    r"|hurried|fates?|undo|risen|whereabouts|company|ledger|mover|lingers?|set aside|brought up|comes? up|below memory"
    r"|own cache|in words|all the same|what of it|of which|for want of|said once)\b"
)
ROLES = re.compile(r"(?<!/)\b[PD]s?\b(?![/\]])")  # prefill and decode engines; column heads may be as short

LISTS = {"test_words.py", "test_docs.py"}  # of these words


def has_banned_word(text: str) -> bool:
    is_prose = text.startswith("#") or '"""' in text
    return bool(PROSE.search(text) or (is_prose and ROLES.search(text)))


def texts_of(path: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            yield token.string


def counted() -> Counter[str]:
    found: Counter[str] = Counter()
    for top in ("vllm_kvtier", "csrc_triton", "examples", "benchmarks", "tests", "tools"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            folder = "/".join(parts[:2]) if top == "vllm_kvtier" and len(parts) > 2 else top
            found[folder] += sum(has_banned_word(text) for text in texts_of(path)) * (path.name not in LISTS)
    return found


def test_prose_has_no_banned_word():
    assert {folder: count for folder, count in counted().items() if count} == {}, "see CONTRIBUTING.md"


def test_docs_have_no_banned_word():
    """All but those that list the old names. A person may be "who", and an option of loginctl's has its name."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    pages = [page for page in pages if page.name not in ("CONTRIBUTING.md", "migration.md")]
    found = {(page.name, match[0]) for page in pages for match in PROSE.finditer(page.read_text("utf-8"))}
    found.discard(("host-cache.md", "linger"))
    assert {(name, word) for name, word in found if word != "who"} == set() and len(pages) > 30
