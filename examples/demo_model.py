"""Makes a tiny model with random weights, for trying mmrouter where no model hub is reachable.

    python examples/demo_model.py [--family FAMILY] DIRECTORY

It says nothing sensible, but what it says depends on every image and every word of the prompt: a
wrong image, or a wrong cache hit, changes the tokens. Same recipe, same weights, on any machine.
The directory appears complete or not at all, and is left alone when this recipe already made it.
"""

import argparse
import hashlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from demo_models import FAMILIES

MARKER = "recipe.json"


def recipe(family: str) -> str:
    """Identifies what these files make, so that a directory made by another version is remade."""
    here = Path(__file__)
    sources = sorted(here.with_name("demo_models").glob("*.py"))
    digest = hashlib.sha256(family.encode())
    for source in (here, *sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def is_complete(directory: Path, family: str) -> bool:
    try:
        return json.loads((directory / MARKER).read_text())["recipe"] == recipe(family)
    except (OSError, ValueError, KeyError):
        return False


def write(directory: Path, family: str) -> None:
    from transformers import AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    importlib.import_module(FAMILIES[family]).write(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    GenerationConfig(
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(directory)
    (directory / MARKER).write_text(json.dumps({"recipe": recipe(family)}) + "\n")


def put_in_place(made: Path, directory: Path, family: str) -> None:
    """Renames ``made`` to ``directory``; an older model of ours there makes room."""
    if (directory / MARKER).exists():
        aside = made.with_name(made.name + ".old")
        directory.rename(aside)
        shutil.rmtree(aside)
    try:
        made.rename(directory)
    except OSError:
        # Someone else finished first, or the directory holds something that is not ours.
        if not is_complete(directory, family):
            raise
        shutil.rmtree(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen2-vl")
    options = parser.parse_args()
    directory, family = options.directory.absolute(), options.family
    if is_complete(directory, family):
        print(f"{directory}: already made")
        return 0
    if directory.exists() and not (directory / MARKER).exists() and any(directory.iterdir()):
        print(f"{directory}: not empty and not made by this script; left alone", file=sys.stderr)
        return 1

    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        made.chmod(0o755)
        write(made, family)
        put_in_place(made, directory, family)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    print(f"{directory}: made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
