"""``python -m tests.families.make MAKER DIRECTORY``: writes a tiny random model."""

import os
import sys
from pathlib import Path


def main(maker: str, directory: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    from tests.families.draw import draw
    from tests.families.makers import MAKERS

    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    tiny = MAKERS[maker]()
    tiny.save(directory)
    if tiny.drawn:
        draw(directory)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
