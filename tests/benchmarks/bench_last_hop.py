"""How long a worker needs to its first token by each way from worker to engine.

    python -m tests.benchmarks.bench_last_hop [--images N]

Starts one CPU worker per way, gives it processed 1024x1024 pictures over shared memory
as a frontend does, and times from dispatch to first output: the picture for the first
time, and the same picture with another question. Prints a table and one JSON line.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import zmq.asyncio
from vllm.renderers.params import ChatParams
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.identity import Incarnation, RequestId
from common.request_plane.card import WorkerCard
from common.request_plane.protocol import Nack, Output, Submit
from common.transfer.transports import TransferMode
from common.vllm_compat.features import server_arguments
from frontend.fetch.loader import MediaLoader
from frontend.media_limits.policy import FetchPolicy
from frontend.processing.preprocessor import Preprocessor, ProcessedPrompt
from frontend.processing.settings import PreprocessSettings
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from tests.benchmarks.telling import telling
from tests.e2e.hops import HOPS
from tests.e2e.processes import SEPARATE_EXECUTOR, card_of, environment, start_worker
from tests.pictures import data_uri, picture

WAYS: dict[str, tuple[list[str], dict[str, str]]] = {"cache-lru": ([], {})} | {
    name: hop for name, hop in HOPS.items() if name != "cache-lru-small"
}


async def prompt(preprocessor: Preprocessor, name: str, question: str) -> ProcessedPrompt:
    """A rendered and processed chat about one picture."""
    url = data_uri(picture(name, (1024, 1024)))
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]
    chat: list[object] = [{"role": "user", "content": content}]
    _, (rendered,) = await preprocessor.renderer.render_chat_async([chat], ChatParams())
    return await preprocessor.process(rendered, SamplingParams(), name, None)


async def first_output_ms(
    link: WorkerLink, media_sender: MediaSender, asked: ProcessedPrompt, name: str, *, ship: bool
) -> float:
    """Milliseconds from dispatch to first output; sending is not timed."""
    worker = link.card.worker_id
    media = list(asked.items().values())
    handles = await media_sender.send(worker, media if ship else [])
    submit = Submit(
        RequestId(name),
        asked.token_ids,
        SamplingParams(max_tokens=1, temperature=0),
        [item.part for item in asked.media],
        [],
    )
    started = time.perf_counter()
    async with aclosing(link.dispatch(submit, handles)) as answers:
        async for answer in answers:
            if isinstance(answer, Nack):
                await link.supply(answer.request_id, await media_sender.send(worker, media))
            if isinstance(answer, Output):
                return (time.perf_counter() - started) * 1e3
    raise RuntimeError(f"{name} got no output")


async def measure(card: WorkerCard, images: int) -> tuple[float, float]:
    """Medians over fresh pictures and over the same ones asked about again."""
    parser = FlexibleArgumentParser()
    server_arguments().make_arg_parser(parser)
    media_sender = MediaSender.create(1 << 29, TransferMode.SHM)
    loader = MediaLoader(FetchPolicy(), 0)
    preprocessor = await asyncio.to_thread(
        Preprocessor,
        card,
        parser.parse_args([]),
        loader=loader,
        arena=media_sender.arena,
        settings=PreprocessSettings(),
    )
    context = zmq.asyncio.Context()
    link = WorkerLink(card, context, Incarnation("bench"), lambda status: None)
    fresh: list[float] = []
    again: list[float] = []
    try:
        await link.open(media_sender.offer())
        media_sender.connect(card.worker_id, link.reply)
        for n in range(images + 2):
            name = f"{card.worker_id}-{n}"
            first = await prompt(preprocessor, name, "What is this?")
            fresh.append(await first_output_ms(link, media_sender, first, f"{name}-a", ship=True))
            second = await prompt(preprocessor, name, "And what is that?")
            again.append(await first_output_ms(link, media_sender, second, f"{name}-b", ship=False))
    finally:
        await link.close()
        context.destroy(linger=0)
        await preprocessor.close()
        await loader.close()
        media_sender.close()
    return statistics.median(fresh[2:]), statistics.median(again[2:])  # two to warm up


def main() -> None:
    os.environ.update(environment())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=12)
    images = parser.parse_args().images
    figures: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = Path(folder)
        script = Path(__file__).parents[2] / "examples" / "demo_model.py"
        subprocess.run([sys.executable, script, root / "model"], check=True)
        for name, (flags, env) in WAYS.items():
            worker = start_worker(
                name, root / "model", root / "cards", root, SEPARATE_EXECUTOR, *flags, env=env
            )
            try:
                with telling(f"{name}: starting the worker"):
                    while not list((root / "cards").glob(f"{name}.*.json")):
                        worker.check_alive()
                        time.sleep(0.2)
                with telling(f"{name}: measuring"):
                    figures[name] = asyncio.run(measure(card_of(root / "cards", name), images))
            finally:
                worker.stop()
    base_fresh, base_again = figures["cache-lru"]
    print(f"\n{'':22}{'fresh ms':>10}{'ratio':>8}{'again ms':>10}{'ratio':>8}")
    for name, (fresh, again) in figures.items():
        print(
            f"{name:22}{fresh:10.1f}{fresh / base_fresh:8.2f}{again:10.1f}{again / base_again:8.2f}"
        )
    print(
        json.dumps(
            {
                name.replace("-", "_"): {
                    "fresh_ms": round(fresh, 2),
                    "again_ms": round(again, 2),
                    "fresh_vs_lru": round(fresh / base_fresh, 3),
                    "again_vs_lru": round(again / base_again, 3),
                }
                for name, (fresh, again) in figures.items()
            }
        )
    )


if __name__ == "__main__":
    main()
