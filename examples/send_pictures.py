"""Sends a few pictures through a running mmrouter and shows where each one went.

    python examples/send_pictures.py [--url http://127.0.0.1:8000] [--stream] [--html FILE]

The first picture is sent twice, then another one: the second request should find the same worker,
tokens in its cache and no tensor bytes to move. ``--html`` writes a page with the pictures beside
the worker that answered, for a browser.
"""

import argparse
import base64
import html
import io
import os
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import APIConnectionError, APIStatusError, OpenAI
from PIL import Image, ImageDraw

HEADER = ("sent", "worker", "prompt", "predicted", "cached", "bytes", "by", "seconds", "answer")


@dataclass(frozen=True)
class Answer:
    request_id: str
    text: str
    seconds: float


def draw(background: str, shape: str, size: int) -> str:
    """A picture of one shape, as a data URI."""
    image = Image.new("RGB", (size, size), background)
    pen = ImageDraw.Draw(image)
    box = (size // 4, size // 4, 3 * size // 4, 3 * size // 4)
    if shape == "circle":
        pen.ellipse(box, fill="white")
    else:
        pen.rectangle(box, fill="yellow")
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(client: OpenAI, model: str, pictures: list[str], stream: bool) -> Answer:
    content = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
    content.append({"type": "text", "text": "Describe what you see."})
    request = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 24,
        "temperature": 0,
    }
    start = time.perf_counter()
    if not stream:
        completion = client.chat.completions.create(**request)
        text = completion.choices[0].message.content or ""
        return Answer(completion.id, text, time.perf_counter() - start)
    request_id, pieces = "", []
    for chunk in client.chat.completions.create(**request, stream=True):
        request_id = chunk.id
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        print("".join(pieces[-1:]), end="", flush=True)
    print()
    return Answer(request_id, "".join(pieces), time.perf_counter() - start)


def trusting(certificate: Path | None) -> ssl.SSLContext:
    """As curl trusts the file of its --cacert, which need not be an authority's."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def decision_of(http: httpx.Client, url: str, request_id: str) -> dict:
    """The router's record of a request, or an empty one if it keeps none, or not for us."""
    response = http.get(f"{url}/mmrouter/decisions", params={"request_id": request_id})
    if response.status_code in (401, 403):
        return {}
    response.raise_for_status()
    return next(iter(response.json()), {})


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def page(rows: list[tuple[str, ...]], pictures: list[list[str]]) -> str:
    """The same table for a browser, with the pictures that each request sent."""
    head, *body = rows
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in ("pictures", *head)) + "</tr>"]
    for row, shown in zip(body, pictures, strict=True):
        images = "".join(f'<img src="{picture}" alt="" width="96">' for picture in shown)
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr><td>{images}</td>{cells}</tr>")
    style = "body{font-family:sans-serif} td,th{padding:.4em;text-align:left}"
    table = "\n".join(lines)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>mmrouter</title>'
        f"<style>{style}</style><table>{table}</table></html>\n"
    )


def run(url: str, stream: bool, size: int, to: Path | None, certificate: Path | None) -> None:
    http = httpx.Client(verify=trusting(certificate), timeout=600)
    key = os.environ.get("OPENAI_API_KEY") or "none"
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)
    model = client.models.list().data[0].id
    circle, square = draw("navy", "circle", size), draw("darkred", "square", size)
    requests = [
        ("a circle", [circle]),
        ("the circle again", [circle]),
        ("a square", [square]),
        ("circle and square", [circle, square]),
    ]
    rows = [HEADER]
    for title, pictures in requests:
        answer = ask(client, model, pictures, stream)
        decision = decision_of(http, url, answer.request_id)
        media = decision.get("media", [])
        figures = (
            decision.get("worker_id"),
            decision.get("prompt_tokens"),
            decision.get("predicted_cached_tokens"),
            decision.get("realised_cached_tokens"),
            sum(item["nbytes"] for item in media) if decision else None,
            "+".join(sorted({item["transport"] for item in media} - {""})) or None,
        )
        known = ("-" if figure is None else str(figure) for figure in figures)
        rows.append((title, *known, f"{answer.seconds:.2f}", answer.text[:32]))
    print(table(rows))
    if all(row[1] == "-" for row in rows[1:]):
        print("Workers and caches are for admins: see /mmrouter/decisions with an admin key.")
    if to is not None:
        to.write_text(page(rows, [pictures for _, pictures in requests]))
        print(f"{to} shows the pictures")


def main() -> int:
    key = "OPENAI_API_KEY is the API key, where one is needed."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=key)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--stream", action="store_true", help="show the answers as they come")
    parser.add_argument("--size", type=int, default=448, help="pixels a side of each picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the pictures")
    parser.add_argument("--cacert", type=Path, metavar="FILE", help="certificate to trust")
    options = parser.parse_args()
    url = options.url.rstrip("/")
    try:
        run(url, options.stream, options.size, options.html, options.cacert)
    except (APIConnectionError, httpx.ConnectError) as error:
        print(
            f"nobody answers at {url} ({error.__cause__ or error}): is it running? `make run` "
            "prints where; say it with --url",
            file=sys.stderr,
        )
        return 1
    except (APIStatusError, httpx.HTTPStatusError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
