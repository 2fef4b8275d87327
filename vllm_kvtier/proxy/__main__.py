"""``python -m vllm_kvtier.proxy``: run the proxy, as ``kvtier proxy`` does."""

import sys

try:
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"The proxy needs the package {error.name}, which is not installed: pip install 'vllm-kvtier[proxy]'")

from vllm_kvtier.cli.proxy import command


def main() -> None:
    typer.run(command())


if __name__ == "__main__":
    main()
