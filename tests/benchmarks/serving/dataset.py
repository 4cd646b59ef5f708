"""Loads as a data set for ``vllm bench serve --dataset-name custom_image``."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from tests.benchmarks.fleet_traffic import PICTURE, Ask
from tests.benchmarks.serving.traffic import Session


def write_dataset(file: TextIO, sessions: Sequence[Session], uri: Callable[[str], str]) -> int:
    """Write a line of JSON for each request.

    That command asks one message at a time, so the messages of a chat become one. Prompts that
    begin alike still do.

    Args:
        uri: of a picture's name.

    Returns:
        How many there are.
    """
    asks = [ask for session in sessions for ask in session]
    for ask in asks:
        file.write(json.dumps({"content": list(_parts(ask, uri))}) + "\n")
    return len(asks)


def _parts(ask: Ask, uri: Callable[[str], str]) -> Iterator[dict[str, object]]:
    for message in ask.messages:
        for content in message.content:
            if content.startswith(PICTURE):
                yield {"type": "image_url", "image_url": {"url": uri(content)}}
            else:
                yield {"type": "text", "text": content}
