"""Encodings in the host's memory: what left the encoder cache is copied back by CUDA."""

import json
from collections import Counter
from pathlib import Path
from typing import Final

from tests.gpu.client import Client
from tests.gpu.results import Encodings
from tests.pictures import data_uri, picture

FLAGS: Final = (
    "--ec-transfer-config="
    + json.dumps(
        {
            "ec_connector": "ECCPUConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"ec_cpu_bytes": 256 << 20},
        }
    ),
    # Room for about three large pictures, so that both caches lose them.
    "--num-gpu-blocks-override=160",
    "--max-num-batched-tokens=4096",
)
_PICTURES: Final = 12
_SAYS: Final = ("unpinned after load", "marked ready", "cudaHostRegister")


def ask_again(router: Client, plain: Client, log: Path) -> Encodings:
    """Ask about more pictures than the caches hold, then something else about each of them.

    Args:
        log: of the worker, at the level DEBUG.
    """
    drawn = [data_uri(picture(f"encoding-{n}", (1024, 1024))) for n in range(_PICTURES)]
    for each in drawn:
        router.ask([each], "Describe what you see.")
    question = "What is in the picture?"
    same = sum(
        router.ask([each], question).tokens == plain.ask([each], question).tokens for each in drawn
    )
    said = log.read_text(errors="replace").splitlines()
    lines = Counter(word for line in said for word in _SAYS if word in line)
    return Encodings(_PICTURES, same, dict(lines))
