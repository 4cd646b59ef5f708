"""``vllm bench serve``, by the two functions that the command calls.

The command itself asks for the version of the distribution ``vllm``, which has another name where
vLLM is built for CPUs.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
