"""Users who meanwhile ask what anybody asks, and must not notice."""

import threading
import time
from typing import Any, Final

import httpx

from tests.pictures import data_uri, picture

PAUSE_S: Final = 0.2
PATIENCE_S: Final = 120.0
_PICTURE: Final = {"type": "image_url", "image_url": {"url": data_uri(picture("others"))}}
_TEXT: Final = {"type": "text", "text": "What is this?"}
_CHAT: Final[dict[str, Any]] = {
    "model": "demo",
    "messages": [{"role": "user", "content": [_PICTURE, _TEXT]}],
    "max_tokens": 4,
}
ASKED: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/embeddings": {"model": "demo", "input": "a red circle"},
    "/classify": {"model": "demo", "input": "a red circle"},
}


class Others(threading.Thread):
    """One user, who asks the same again and again.

    Attributes:
        asked, failed: requests, and those with another answer than the first.
        slowest_s: of all answers, as this machine's clock has it.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True, name="others")
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self._over = threading.Event()
        self.asked = 0
        self.failed: list[str] = []
        self.slowest_s = 0.0
        self._path, self._right = self._first()

    def run(self) -> None:
        while not self._over.wait(PAUSE_S):
            began = time.monotonic()
            said = self._ask(self._path)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.asked += 1
            if said != self._right:
                self.failed.append(said[:300])

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._http.close()

    def _first(self) -> tuple[str, str]:
        for path in ASKED:
            said = self._ask(path)
            if not said.startswith(("404", "400")):
                assert said.startswith("200"), said
                return path, said
        raise AssertionError("nothing that is known here is served")

    def _ask(self, path: str) -> str:
        try:
            reply = self._http.post(path, json=ASKED[path])
        except httpx.TransportError as error:
            return f"no answer: {error!r}"
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text}"
        answer = reply.json()
        return f"200 {answer.get('choices') or answer['data']}"
