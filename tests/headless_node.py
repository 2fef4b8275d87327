"""What ``vllm serve --headless`` runs, for the second node of an engine; vLLM's command wants a distribution "vllm"."""

import sys

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    ServeSubcommand.cmd(parser.parse_args(["serve", *sys.argv[1:], "--headless"]))
