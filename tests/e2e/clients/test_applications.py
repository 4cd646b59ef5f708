"""What stands between users and the frontend, or measures it: Open WebUI's calls, LiteLLM's proxy,
``vllm bench serve``, the example client, and the ``curl`` lines of the docs."""

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from setup.links import ROOT, pages
from tests.e2e.clients.programs import open_webui, openai_sdk
from tests.e2e.clients.programs.outcomes import Endpoint as Given
from tests.e2e.clients.programs.outcomes import outcome
from tests.e2e.clients.running import ENVIRONMENT, client_command
from tests.e2e.conftest import Endpoint, Stack
from tests.e2e.processes import HttpServer, engine_pid, paused, run_python
from tests.ports import free_port
from tests.waiting import until

# Open WebUI


@pytest.mark.parametrize("name", open_webui.case.table)
async def test_open_webui(ours: Given, theirs: Given, name: str) -> None:
    call = open_webui.case.table[name]
    mine, other = [await call(at) for at in (ours, theirs)]  # type: ignore[misc] # all are async
    if name == "a_broken_picture":  # in our own words
        assert isinstance(mine, list) and isinstance(other, list)
        mine, other = mine[:2], other[:2]
    assert mine == other


async def test_what_open_webui_stops_is_aborted(
    stack: Stack, ours: Given, router: Endpoint
) -> None:
    engines = [engine_pid(stack.discovery, name) for name in router.workers()]
    async with open_webui.begun(ours) as stop:
        with paused(*engines):  # or it could come to its end
            stop()
            await until(lambda: not any(w["active_requests"] for w in router.workers().values()))
    await until(lambda: not any(w["running"] for w in router.workers().values()))


# LiteLLM's proxy


@pytest.fixture(scope="module")
def litellm_proxy(
    ours: Given, theirs: Given, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Given]:
    """It serves the frontend as ``ours`` and the plain vLLM as ``theirs``."""
    directory = tmp_path_factory.mktemp("litellm")
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": f"hosted_vllm/{at.model}",
                "api_base": f"{at.url}/v1",
                "api_key": at.key,
            },
        }
        for name, at in (("ours", ours), ("theirs", theirs))
    ]
    settings = {"litellm_settings": {"num_retries": 0}, "model_list": models}
    (directory / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    port = free_port()
    command = [client_command("litellm"), "--config", str(directory / "config.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    key = f"sk-{secrets.token_hex(16)}"
    extra = ENVIRONMENT | {"LITELLM_MASTER_KEY": key}
    proxy = HttpServer("litellm", command, directory / "litellm.log", port, **extra)
    try:
        proxy.wait_for_status(200, "/health/liveliness")
        yield replace(ours, url=proxy.url, key=key)
    finally:
        proxy.stop()


@pytest.mark.parametrize(
    "name",
    [
        "text",
        "a_picture",
        "a_stream_with_usage",
        "a_stream_about_a_picture",
        "a_structured_answer",
        "a_question_that_is_too_long",
        "a_broken_picture",
        "a_stream_about_a_broken_picture",
    ],
)
def test_litellm_proxy(litellm_proxy: Given, ours: Given, name: str) -> None:
    call = openai_sdk.case.table[name]

    def ask(model: str) -> str:
        given = replace(litellm_proxy, model=model)
        found = outcome(lambda: call(given))
        if "raised" in found:  # in our own words
            found = {key: found.get(key) for key in ("raised", "status")}
        return json.dumps(found).replace(model, "the model")

    assert ask("ours") == ask("theirs")
    direct = outcome(lambda: call(ours))
    assert outcome(lambda: call(replace(litellm_proxy, model="ours"))).keys() >= {*direct} & {
        "answer",
        "raised",
    }


# vllm bench serve


def test_vllm_bench_serve(stack: Stack, tmp_path: Path) -> None:
    done = run_python(
        "-m", "tests.e2e.clients.programs.bench_serve",
        f"--base-url={stack.frontend.url}", "--backend=openai-chat",
        "--endpoint=/v1/chat/completions", "--model=demo", f"--tokenizer={stack.model}",
        "--dataset-name=random-mm", "--num-prompts=4", "--random-input-len=16",
        "--random-output-len=4", "--random-mm-base-items-per-request=1",
        '--random-mm-limit-mm-per-prompt={"image": 1, "video": 0}',
        "--random-mm-bucket-config={(56, 56, 1): 1.0}", "--num-warmups=0",
        "--save-result", f"--result-dir={tmp_path}", "--result-filename=result.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 4
    assert result["failed"] == 0
    assert result["total_output_tokens"] == 16
    assert result["mean_ttft_ms"] > 0


# The example client


def test_the_example_shows_the_pictures_and_who_answered(router: Endpoint, tmp_path: Path) -> None:
    page = tmp_path / "pictures.html"
    example = ROOT / "examples" / "send_pictures.py"
    done = subprocess.run(
        [sys.executable, str(example), f"--url={router.url}", "--size=56", f"--html={page}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, *rows = re.findall(r"<tr>(.*?)</tr>", page.read_text())
    sent = [re.findall(r'src="(data:image/png;base64,[^"]+)"', row) for row in rows]
    assert [len(pictures) for pictures in sent] == [1, 1, 1, 2]
    assert sent[0] == sent[1] != sent[2]
    assert sent[3] == sent[0] + sent[2]
    workers = [re.findall("<td>([^<]*)</td>", row)[1] for row in rows]
    assert {*workers} <= {*router.workers()}
    assert workers[0] == workers[1], "the second finds what the first left"
    assert all(worker in done.stdout for worker in workers)


# The curl lines of the docs

FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^curl (?:.*\\\n)*.*$", re.MULTILINE)
HERE = "http://127.0.0.1:8000"
"""Where the docs' examples ask; replaced by the address of the frontend under test."""


def curl_lines() -> list[tuple[str, str]]:
    """Each page that shows some, with those of a block; what follows one by ``\\``, too."""
    return [
        (str(page.relative_to(ROOT)), "\n".join(commands))
        for page in pages()
        for block in FENCE.findall(page.read_text())
        if (commands := COMMAND.findall(block))
    ]


def test_the_docs_show_how_to_ask_by_curl_where_it_is_run() -> None:
    assert {page for page, _ in curl_lines()} >= {"docs/clients.md", "docs/operations.md"}
    for page in pages():
        elsewhere = FENCE.sub("", page.read_text())
        assert not re.search(r"^\W*curl -", elsewhere, re.MULTILINE), page


@pytest.mark.parametrize(("page", "commands"), curl_lines())
def test_the_curl_lines_of_the_docs(router: Endpoint, page: str, commands: str) -> None:
    assert commands.count(HERE) == len(COMMAND.findall(commands)), f"{page} asks elsewhere"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands.replace(HERE, router.url)],
        env=os.environ | {"NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert '"error"' not in done.stdout
