"""Check documented command lines with vLLM's parser, ours, and the files and options that they name.

``Checker.check`` raises AssertionError with the cause. Nothing is run. Files in commands (prompts, keys,
configurations) are created in a temporary directory for parsers that look for them.
"""

import ast
import contextlib
import functools
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import mooncake_master
import msgspec
import typer
import yaml
from docs_blocks import ROOT, Command, commands_of

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.proxy.app import _ADMIN
from vllm_kvtier.proxy.config_file import load_settings
from vllm_kvtier.proxy.messages.request_bodies import Route
from vllm_kvtier.proxy.routes.passthrough import find_passthrough
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.wire.auth import ClusterKey

# Commands of the system; only their redirections are checked.
PLAIN = {
    "apt-get", "awk", "cat", "cd", "chmod", "cp", "df", "echo", "export", "git", "grep", "head", "ip", "jq", "kill",
    "ls", "mkdir", "nvidia-smi", "rm", "sed", "sleep", "sort", "sysctl", "tail", "time", "timeout", "true", "ulimit",
    "wait", "watch",
}  # fmt: skip
PREFIXES = {"sudo", "exec", "nohup"}
PROXY_OWN = {"/health", "/ready", "/metrics", "/kvtier/state", "/kvtier/query", *_ADMIN, *(r.value for r in Route)}
# Of engines: what vLLM's own application has is asked of it; these it only has in some modes.
ENGINE_MODES = {"/reset_prefix_cache", "/sleep", "/wake_up"}
KEY_FILES = re.compile(r"(^|/)cluster\.key$|\.ckey$")


@functools.cache
def serve_parser():
    """``vllm serve``'s, whichever module this vLLM has it in; seconds."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


@functools.cache
def engine_routes() -> frozenset[str]:
    level = logging.getLogger().level
    try:
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.api_server import build_app
    app = build_app(serve_parser().parse_args(["MODEL"]), ("generate",))
    logging.getLogger().setLevel(level)  # making it sets the root logger's, which other tests listen to
    return frozenset(route.path for route in app.routes if hasattr(route, "path"))


@functools.cache
def kvtier_command():
    """The typer application as a group of commands."""
    from vllm_kvtier.cli.__main__ import app

    return typer.main.get_command(app)


@functools.cache
def extras() -> frozenset[str]:
    """Names in setup.py's extras_require."""
    tree = ast.parse((ROOT / "setup.py").read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    call = next(node for node in calls if getattr(node.func, "id", "") == "setup")
    value = next(word.value for word in call.keywords if word.arg == "extras_require")
    return frozenset(key.value for key in value.keys)


class Checker:
    def __init__(self, folder: Path):
        """``folder``: for files that commands name; it becomes the current directory while one is checked."""
        self.folder = folder
        self.key = folder / "cluster.key"
        if not self.key.exists():
            ClusterKey.create(str(self.key))
        self._cut = False
        self.seen: set[str] = set()  # first words of the checked commands, to see that some were

    # -- scripts and configurations -----------------------------------------------------------------------------

    def script(self, text: str) -> None:
        for command in commands_of(text):
            for name, content in command.files.items():
                self.writes(name, content)
            self.check(command)

    def writes(self, name: str, content: str | None) -> None:
        """A file that a script makes: later commands may name it."""
        if content is None:
            content = ""
        elif name.endswith((".yaml", ".yml", ".json", ".toml")):
            self.document(Path(name).suffix[1:].replace("yml", "yaml"), content)
        if not os.path.isabs(name):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    def document(self, kind: str, text: str) -> None:
        """A configuration or a request, checked by its reader. ``kind``: json, yaml or toml."""
        if kind == "json":
            values = [json.loads(text)]
        elif kind == "toml":
            values = [msgspec.toml.decode(text)]
        else:
            values = list(yaml.safe_load_all(text))
        for value in values:
            self._consumer(kind, value, text)

    def _consumer(self, kind: str, value: object, text: str) -> None:
        assert isinstance(value, dict | list), f"neither an object nor a list: {value!r}"
        if isinstance(value, list):
            return
        if "kv_connector" in value:
            self.transfer_config(value)
        elif "apiVersion" in value:
            from docs_kubernetes import schema_problems

            assert not (problems := schema_problems(value)), problems
        elif "engines" in value and kind in ("yaml", "toml"):
            file = self.folder / f"checked.{kind}"
            file.write_text(text)
            load_settings(str(file), {})
        elif "kv_connector_extra_config" in value:
            self.options(value["kv_connector_extra_config"])

    def transfer_config(self, value: dict) -> None:
        """``--kv-transfer-config``: by vLLM, and if the connector is ours by us."""
        from vllm.config import KVTransferConfig

        config = KVTransferConfig(**value)
        if config.kv_connector == "KVTierConnector":
            self.options(config.kv_connector_extra_config)

    def options(self, extra: dict) -> KVTierConfig:
        """``kv_connector_extra_config``. A cluster key elsewhere is taken to be there."""
        extra = dict(extra)
        name = extra.get("cluster_key_file", "")
        if name and not (self.folder / name).exists():
            assert KEY_FILES.search(name), f"cluster_key_file {name!r} is no name that these checks know for one"
            extra["cluster_key_file"] = str(self.key)
        with contextlib.chdir(self.folder):
            config = KVTierConfig.from_extra_config(extra)
            if config.store != "off":  # what an engine would start the store with
                from vllm_kvtier.scheduler.sources.node_store import _store_options

                _store_options(config)
        return config

    # -- commands -------------------------------------------------------------------------------------------------

    def check(self, command: Command) -> None:
        words = [word for word in command.words if word != "..."]
        self._cut = len(words) < len(command.words)  # the page leaves something out
        while words and words[0] in PREFIXES:
            words = words[1:]
        if not words:
            return
        name = "python" if re.fullmatch(r"(.*/)?python3?", words[0]) else words[0]
        self.seen.add(name)
        if name in PLAIN:
            return
        check = getattr(self, f"_{name}", None)
        assert check is not None, f"no check knows the command {name!r}: {command.text!r}"
        with contextlib.chdir(self.folder):
            check(words[1:])

    def _vllm(self, words: list[str]) -> None:
        assert words[0] == "serve", words
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
                parsed = serve_parser().parse_args(words[1:])
        except SystemExit:
            raise AssertionError(f"vllm serve does not take this: {errors.getvalue().splitlines()[-6:]}") from None
        assert parsed.model_tag, "vllm serve without a model"
        config = parsed.kv_transfer_config
        if config is not None and config.kv_connector == "KVTierConnector":
            self.options(config.kv_connector_extra_config)

    def _mooncake_master(self, words: list[str]) -> None:
        """Its own help has its options; not checked where it is not installed."""
        if not mooncake_master.why_not():
            ran = subprocess.run([mooncake_master.binary(), "--help"], capture_output=True, text=True, timeout=20)
            for word in words:
                name = word.partition("=")[0].removeprefix("--")
                assert re.search(rf"^ +-{name} \(", ran.stdout, re.M), f"mooncake_master has no option {name}"

    def _moto_server(self, words: list[str]) -> None:
        assert re.fullmatch(r"-p \d+", " ".join(words)), words

    def _kvtier(self, words: list[str]) -> None:
        files = ("--file", "--prompt", "--messages", "--compare-with", "--trace", "--cluster-key", "--machine")
        for word, before in zip(words, ["", *words], strict=False):
            if before in (*files, "--salt-secret"):
                self._there(word)
        group = kvtier_command()
        if words[0] == "--help":
            return
        name, *rest = words
        command = group.commands.get(name)
        assert command is not None, f"kvtier has no command {name!r}"
        if "--help" in rest:
            return
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                given = command.make_context(name, rest).params
        except Exception as error:  # typer brings a click of its own, whose classes are not click's
            if not hasattr(error, "format_message"):
                raise
            if self._cut and error.format_message().startswith("Missing option"):
                return
            raise AssertionError(f"kvtier {' '.join(words)}: {error.format_message()}") from error
        if name == "store":
            options = {key: given[key] for key in (f.name for f in StoreOptions.__dataclass_fields__.values())}
            if options["cluster_key_file"]:
                assert KEY_FILES.search(options["cluster_key_file"]), options["cluster_key_file"]
                options["cluster_key_file"] = str(self.key)
            StoreOptions(**options)
        elif name == "proxy":
            from vllm_kvtier.cli.proxy import _engines_read

            file = given.pop("config")
            options = _engines_read(given)
            if options.get("cluster_key_file"):
                options["cluster_key_file"] = str(self.key)
            if file is None or Path(file).exists():  # otherwise no page has shown it
                load_settings(file, options)
            else:
                assert Path(file).suffix in (".yaml", ".json", ".toml"), file

    def _there(self, name: str) -> None:
        """A prompt, chat or key that the reader is to have."""
        if os.path.isabs(name) or Path(name).exists():
            return
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        if KEY_FILES.search(name):
            ClusterKey.create(name)
        else:
            content = json.dumps([{"role": "user", "content": "Hello"}]) if name.endswith(".json") else "Hello\n"
            Path(name).write_text(content)

    def _python(self, words: list[str]) -> None:
        if words[0] == "-c":
            compile(words[1], "<snippet>", "exec")
            return
        if words[0] == "-m":
            if words[1] == "pip":
                return self._pip(words[2:])
            if words[1] == "pytest":
                return self._pytest(words[2:])
            spec = importlib.util.find_spec(words[1])
            assert spec is not None and spec.origin, f"there is no module {words[1]}"
            sources, rest = [Path(spec.origin)], words[2:]
            if words[1] == "vllm.entrypoints.openai.api_server":
                assert words[2] == "--model", words
                return self._vllm(["serve", *words[3:]])
            if words[1] == "vllm_kvtier.wire.auth":
                assert len(rest) == 1, "python -m vllm_kvtier.wire.auth FILE"
                Path(rest[0]).name and self._there(rest[0])
                return
            if words[1] == "vllm_kvtier.store":
                return self._kvtier(["store", *rest])
            if words[1] == "vllm_kvtier.proxy":
                return self._kvtier(["proxy", *rest])
        else:
            path = ROOT / words[0]
            assert path.exists(), f"there is no {words[0]}"
            sources, rest = sorted(path.glob("*.py")) if path.is_dir() else [path, *_imported(path)], words[1:]
        text = "\n".join(source.read_text("utf-8") for source in sources)
        for word in rest:
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                assert re.search(rf"[\"']{re.escape(flag)}[\"']", text), f"{words[0]} has no option {flag}"

    _python3 = _python

    def _pytest(self, words: list[str]) -> None:
        for word in words:
            if word.startswith(("tests/", "tests")):
                assert list(ROOT.glob(word.partition("::")[0])), f"there is no {word}"

    def _pip(self, words: list[str]) -> None:
        assert words[0] == "install", words
        for word in words[1:]:
            if match := re.fullmatch(r"(?:\.|/src|vllm-kvtier)(?:\[([\w,-]+)\])?", word):
                wrong = set(filter(None, (match[1] or "").split(","))) - extras()
                assert not wrong, f"setup.py has no extra {wrong}"
            else:
                assert re.fullmatch(r"-{1,2}[\w-]+|[\w.-]+(\[[\w,]+\])?([<>=~!]=?[\w.*]+)?", word), word

    def _make(self, words: list[str]) -> None:
        makefile = (ROOT / "Makefile").read_text("utf-8")
        for word in words:
            name, is_variable, _ = word.partition("=")
            pattern = rf"^{name} \?=|\b{name}\b" if is_variable else rf"^{re.escape(name)}:"
            assert re.search(pattern, makefile, re.M), f"the Makefile has no {name}"

    def _docker(self, words: list[str]) -> None:
        given = dict(zip(words, words[1:], strict=False))
        if words[0] == "push":
            return
        if words[0] == "compose":
            assert yaml.safe_load((ROOT / given["-f"]).read_text("utf-8"))["services"], given["-f"]
            return
        assert words[0] == "build", words
        dockerfile = ROOT / given["-f"]
        assert dockerfile.exists(), f"there is no {given['-f']}"
        stages = re.findall(r"^FROM \S+ AS (\w+)$", dockerfile.read_text("utf-8"), re.M)
        assert given["--target"] in stages, f"{given['-f']} has no stage {given['--target']}"

    def _git(self, words: list[str]) -> None:
        assert words[0] in ("clone", "pull"), words

    def _aws(self, words: list[str]) -> None:
        assert words[0] in ("s3", "s3api"), words

    def _export(self, words: list[str]) -> None:
        assert all(re.match(r"[A-Za-z_]\w*=", word) for word in words), words

    def _kubectl(self, words: list[str]) -> None:
        from docs_kubernetes import kubectl_problem

        problem = kubectl_problem(words, self)
        assert not problem, problem

    def _helm(self, words: list[str]) -> None:
        """Rendered with the values that it sets, where helm is installed."""
        assert words[0] in ("install", "upgrade", "repo"), words
        if words[0] == "repo":
            return
        release, chart = words[1:3]
        if chart == "vllm/vllm-stack":  # another project's: test_production_stack.py renders it
            assert (ROOT / words[words.index("-f") + 1]).exists(), words
            return
        assert (ROOT / chart / "Chart.yaml").exists(), f"there is no chart {chart}"
        helm = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.prefix, "bin")))
        if helm is not None:
            rest = [word for word in words[3:] if word != "--reset-then-reuse-values"]
            ran = subprocess.run(
                [helm, "template", release, str(ROOT / chart), *rest], capture_output=True, text=True, timeout=60
            )
            assert ran.returncode == 0, ran.stderr

    def _curl(self, words: list[str]) -> None:
        urls = [word for word in words if word.startswith(("http://", "https://"))]
        assert len(urls) == 1, f"one URL, not {urls}"
        for option, value in zip(words, words[1:], strict=False):
            if option in ("-d", "--data", "--json") and not value.startswith("@"):
                json.loads(value)
        path = urlsplit(urls[0]).path
        passed = path in PROXY_OWN | ENGINE_MODES or find_passthrough(path, ()) is not None
        assert passed or path in engine_routes(), f"neither the proxy nor vLLM has {path}"


def _imported(script: Path) -> list[Path]:
    """Modules beside a script that it imports, where its options may be."""
    names = re.findall(r"^(?:from|import) (\w+)", script.read_text("utf-8"), re.M)
    return [path for name in names if (path := script.with_name(f"{name}.py")).exists()]


def refused(check, *arguments) -> str:
    """What a check that fails says; "" if it does not."""
    try:
        check(*arguments)
    except (AssertionError, KVTierError, ValueError, TypeError, yaml.YAMLError) as error:
        return str(error) or type(error).__name__
    return ""
