"""Check a simulated engine: ``python -m tests.simgpu.check`` (or ``make check-simgpu``).

Starts vLLM's own server with one, asks about the same picture twice, about another one, and in a
burst. Fails unless the answers depend on the prompt alone, caches save modelled time, the totals
say so, and the engine kept to its model of time.
"""

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.benchmarks.telling import telling
from tests.pictures import data_uri, picture
from tests.simgpu.gpu import GpuModel
from tests.simgpu.start import start_sim_vllm
from tests.simgpu.stats import WRITE_EVERY_S, Stats
from tests.simgpu.totals import (
    LateEnginesError,
    late_share,
    read_totals,
    refuse_late,
    since,
)

TOKENS = 16
BURST = 8
BURST_TOKENS = 100


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        spent: what the engine did for it.
    """

    text: str
    cached_tokens: int
    spent: Stats


class Lab:
    """One simulated server."""

    def __init__(self, url: str, totals: Path) -> None:
        self._http = httpx.Client(base_url=url, timeout=300)
        self._totals = totals

    def ask(self, name: str, tokens: int = TOKENS) -> tuple[str, int]:
        """Ask about a picture; the answer, and how many prompt tokens were cached."""
        content = [
            {"type": "image_url", "image_url": {"url": data_uri(picture(name))}},
            {"type": "text", "text": "What is it?"},
        ]
        reply = self._http.post(
            "/v1/chat/completions",
            json={
                "model": "demo",
                "max_tokens": tokens,
                "messages": [{"role": "user", "content": content}],
            },
        )
        reply.raise_for_status()
        body = reply.json()
        details = body["usage"].get("prompt_tokens_details") or {}
        return body["choices"][0]["message"]["content"], details.get("cached_tokens") or 0

    def totals(self) -> Stats:
        """What the engine has done, once it has written it."""
        time.sleep(2 * WRITE_EVERY_S)
        return read_totals(self._totals)

    def asked(self, name: str) -> Answer:
        """Ask alone."""
        before = self.totals()
        text, cached = self.ask(name)
        return Answer(text, cached, since(before, self.totals()))


def expect(condition: bool, what: str) -> None:
    """Ends the check with a sentence unless a condition holds."""
    if not condition:
        raise SystemExit(f"not so: {what}")
    print(f"  {what}")


def check(lab: Lab) -> dict[str, float]:
    """All of it; the figures of the burst."""
    first, again, other = lab.asked("one"), lab.asked("one"), lab.asked("another")
    expect(first.cached_tokens == 0, "a picture is not cached at first sight")
    expect(first.spent.encoder_items == 1, "and is encoded")
    expect(first.spent.steps >= TOKENS, "a token takes a step")
    expect(again.cached_tokens > 0, "the same prompt is cached the second time")
    expect(again.spent.encoder_items == 0, "and not encoded again")
    expect(again.spent.busy_seconds < first.spent.busy_seconds, "and takes less modelled time")
    expect(again.text == first.text, "the answer does not depend on the cache")
    expect(other.text != first.text, "another picture, another answer")

    before = lab.totals()
    began = time.monotonic()
    with ThreadPoolExecutor(BURST) as pool:
        texts = list(pool.map(lambda _: lab.ask("one", BURST_TOKENS)[0], range(BURST)))
    seconds = time.monotonic() - began
    burst = since(before, lab.totals())
    expect(len(set(texts)) == 1, "nor on the batch")
    expect(burst.steps < BURST * BURST_TOKENS, "requests share steps")
    try:
        refuse_late(burst)
    except LateEnginesError as error:
        raise SystemExit(str(error)) from error
    return {
        "burst_s": round(seconds, 3),
        "busy_s": round(burst.busy_seconds, 3),
        "late_share": round(late_share(burst), 4),
        "stall_share": round(burst.stall_seconds / burst.busy_seconds, 4),
        "cpu_ms_per_step": round(burst.cpu_seconds / burst.steps * 1e3, 3),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="simgpu-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        script = Path(__file__).parents[2] / "examples" / "demo_model.py"
        model = directory / "model"
        subprocess.run([sys.executable, script, model], check=True, capture_output=True)
        totals = directory / "totals"
        server = start_sim_vllm(model, directory, (), stats=totals, gpu=GpuModel())
        stack.callback(server.stop)
        with telling("starting the engine"):
            server.wait_for_status(200)
        print(json.dumps(check(Lab(server.url, totals))))


if __name__ == "__main__":
    main()
