"""``python setup/limits_page.py FILE``: writes the page on routes, fields and their limits."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm.envs import VLLM_MAX_BAD_WORDS_TOTAL_TOKENS

from backend_worker.engine.sampler_limits import MAX_ALLOWED, MAX_STOP_TOKENS
from backend_worker.engine.sampler_limits import MAX_BIASES as MAX_BIASES_ON_GPUS
from frontend.gate.body_gate import MAX_BRACKETS, MAX_COMMAS
from frontend.gate.fields import FIELDS, KINDS, MAX_FIELDS, NESTED, UNKNOWN, Limit
from frontend.gate.forms import MAX_HEAD_BYTES, MAX_PARTS, MAX_TEXT_BYTES
from frontend.gate.judge import (
    MAX_ASKED,
    MAX_COMPARED,
    MAX_COPIED,
    MAX_LABELS,
    MAX_LENGTH_PENALTY,
    MAX_RENDERED,
    MAX_SAMPLED,
    MAX_SHARED,
    MAX_STREAM_INTERVAL,
    MAX_TOKEN_ID,
    NOT_FROM_CLIENTS,
    PROCESSOR_INPUTS,
    RENDERER_OPTIONS,
    VALUE_WEIGHT,
)
from frontend.http.operator.vllm_routes import ADAPTERS, PROFILER, REFUSED
from frontend.http.server.serving_threads import MAX_SEARCHED
from frontend.http.settings import TOKENS_AN_INPUT
from frontend.request.answer_limits import (
    MAX_LOGPROBS,
    MAX_OF_ONE,
    MAX_REPEATED,
    MEDIUM_AS_TOKENS,
)
from frontend.request.call_gate import FEW_BIASES, FEW_CHOICES, MAX_BIASES

_APP: Final = "by vLLM's app"

_SERVED: Final[Mapping[str, str]] = {
    _APP: """
        /health /load /version /ping /invocations /tokenize /detokenize /v1/models /v1/completions
        /v1/chat/completions /v1/chat/completions/batch /v1/responses /v1/systemone
        /v1/messages /v1/messages/count_tokens /generative_scoring /v1/decisions
    """,
    "here, with a 404 that says that no responses are stored": """
        /v1/responses/{response_id} /v1/responses/{response_id}/cancel
    """,
    "by vLLM's app, for models that pool, and for what they are for": """
        /pooling /classify /v1/embeddings /v2/embed /score /v1/score /rerank /v1/rerank /v2/rerank
    """,
    "by vLLM's app, for models that take speech": """
        /v1/audio/transcriptions /v1/audio/translations
    """,
    "by vLLM's app, with --enable-scale-out": """
        /v1/chat/completions/render /v1/messages/render /v1/completions/render /v1/responses/render
        /v1/chat/completions/derender /v1/completions/derender /inference/v1/generate
    """,
    "by vLLM's app, with --enable-tokenizer-info-endpoint": "/tokenizer_info",
    "by vLLM's app, if the package cohere is installed": "/cohere/v2/chat /cohere/v2/chat/render",
    "for all processes of a frontend": "/metrics",
    "by vLLM's app, unless --disable-fastapi-docs": """
        /openapi.json /docs /docs/oauth2-redirect /redoc /static
    """,
    "by vLLM's app, of this frontend, with VLLM_SERVER_DEV_MODE": "/server_info",
}

SERVED: Final[Mapping[str, str]] = {
    path: how for how, paths in _SERVED.items() for path in paths.split()
}
"""Routes that work, and how."""

_TEXT: Final = """\
<!-- Made by `make docs` from frontend/gate/fields.py and frontend/http/operator/vllm_routes.py: \
change those. -->
# Routes, fields, and their limits

Clients find vLLM's API: its routes, with the fields that it documents.
[What differs](clients.md#what-differs-from-a-plain-vllm) is listed, and so are fields
[refused or ignored](clients.md#fields-that-are-refused-and-fields-that-are-ignored).

## Routes of vLLM

| routes | are served |
|---|---|
{served}

These answer 501 and say why:

| routes | because |
|---|---|
{refused}

Ours are `/status` and what is below `/mmrouter/`: [operations](operations.md#what-to-watch).

## Limits of a request

A frontend judges the body of each request before vLLM validates it. A body beyond one of these
limits gets 400 with the name of the field. The flag `--max-body-mb` bounds its bytes.

| what | limit |
|---|---|
| fields of a body | {fields} |
| lists and objects, and brackets in texts | {brackets} |
| values, and commas in texts | {commas} |
| choices: `n` times prompts, conversations, or items to score | `--max-choices` |
| choices of one prompt (`n`) | half of the largest worker's `--max-num-seqs`, at least \
{few_choices} |
| KV cache of a worker that more than 16 answers of a request fill while other clients wait | half |
| `label_token_ids` times `items` | {labels} |
| tokens of all inputs to pool or score, where a query counts with each document or item | \
{tokens} for each of `--max-pooling-inputs`, and at least 1,048,576 |
| characters of the kinds words to tools, times prompts, conversations or documents if there are \
several; a value counts as {value_weight} | {shared} |
| the same times choices | {copied} |
| entries of `allowed_token_ids`, `logit_bias` and `stop_token_ids`, and 128 for each of \
`bad_words`, times choices if there are several | {sampled} |
| entries of `logit_bias`, a quarter of those of `allowed_token_ids`, and those of \
`stop_token_ids` with `min_tokens`, times choices, of all \
requests under way with more than {few_biases}; beyond it 429, but one request alone may have more \
| {biases} |
| entries of `allowed_token_ids`; of `logit_bias`; of `stop_token_ids` with `min_tokens`, the \
model's own among them; tokens of `bad_words`: by workers on GPUs, whose samplers have no room \
for more | {samplers} |
| log probabilities: candidates of all tokens of several prompts or choices; of one answer that is \
no stream | {logprobs}; {alone} |
| tokens of prompts times their choices, where there are several; a medium counts as {medium} \
more | {repeated} |
| characters of a request times its `questions` | {asked} |
| `repetition_detection`: `max_pattern_size`, squared, times `min_count` and choices | {compared} |
| `stream_interval` | {interval} |
| ids of the kind tokens | {token_id} |
| `length_penalty`, or minus it | {penalty:g} |
| characters of `chat_template_kwargs` times values of messages | {rendered} |
| characters of a `prompt` or of `hotwords` of speech, times `<` in it | {searched} |
| parts of a form; bytes of the headers of each, and of each that is no file | {form} |

## Fields

Each field is of a kind. It has the same limit on all routes.

| kind | entries | values within | nested | characters | why |
|---|---|---|---|---|---|
{kinds}

A list of objects in `inputs` has the limits of `messages`. {nested} hold fields of their own, which
are judged in the same way. A field that vLLM does not know is ignored, within the limits of the
last line, which hold for all such fields together.

{fields_of_kinds}

## What no limit allows

- A content part of type `{pil}`: it is for programs that call vLLM's own code.
- In `chat_template_kwargs`: {renderer}. These are parameters of Hugging Face's renderer; variables
  of templates are allowed.
- In `mm_processor_kwargs`: {processor}. Media come as content parts.
"""


def page() -> str:
    """The page as it has to be."""
    rows = [_row(name, limit) for name, limit in (*KINDS.items(), ("unknown", UNKNOWN))]
    fields = [
        f"- **{kind}**: {_names(name for name in FIELDS if FIELDS[name] is limit)}"
        for kind, limit in KINDS.items()
    ]
    of_workers = {
        **dict.fromkeys(sorted(PROFILER), "by all workers, for admins"),
        **dict.fromkeys(
            sorted(ADAPTERS), "by all workers, for admins, with VLLM_ALLOW_RUNTIME_LORA_UPDATING"
        ),
    }
    bad_words = VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    return _TEXT.format(
        served=_by_words({**SERVED, **of_workers}),
        refused=_by_words(dict(sorted(REFUSED.items()))),
        fields=MAX_FIELDS,
        brackets=f"{MAX_BRACKETS:,}",
        commas=f"{MAX_COMMAS:,}",
        labels=f"{MAX_LABELS:,}",
        tokens=TOKENS_AN_INPUT,
        shared=f"{MAX_SHARED:,}",
        copied=f"{MAX_COPIED:,}",
        sampled=f"{MAX_SAMPLED:,}",
        few_biases=f"{FEW_BIASES:,}",
        biases=f"{MAX_BIASES:,}",
        samplers=f"{MAX_ALLOWED:,}; {MAX_BIASES_ON_GPUS:,}; {MAX_STOP_TOKENS:,}; {bad_words:,}",
        value_weight=VALUE_WEIGHT,
        logprobs=f"{MAX_LOGPROBS:,}",
        alone=f"{MAX_OF_ONE:,}",
        few_choices=FEW_CHOICES,
        medium=MEDIUM_AS_TOKENS,
        repeated=f"{MAX_REPEATED:,}",
        asked=f"{MAX_ASKED:,}",
        compared=f"{MAX_COMPARED:,}",
        penalty=MAX_LENGTH_PENALTY,
        rendered=f"{MAX_RENDERED:,}",
        interval=f"{MAX_STREAM_INTERVAL:,}",
        token_id=f"{MAX_TOKEN_ID:,}",
        searched=f"{MAX_SEARCHED:,}",
        form=f"{MAX_PARTS:,}; {MAX_HEAD_BYTES:,}; {MAX_TEXT_BYTES:,}",
        kinds="\n".join(rows),
        nested=_names(NESTED),
        fields_of_kinds="\n".join(fields),
        pil=NOT_FROM_CLIENTS,
        renderer=_names(RENDERER_OPTIONS),
        processor=_names(PROCESSOR_INPUTS),
    )


def _by_words(table: Mapping[str, str]) -> str:
    """Rows of a table of routes: those together of which the same is said."""
    routes: dict[str, list[str]] = {}
    for path, words in table.items():
        routes.setdefault(words.replace(path, "/NAME"), []).append(path)
    return "\n".join(f"| {_names(paths)} | {words} |" for words, paths in routes.items())


def _row(name: str, limit: Limit) -> str:
    characters = "" if limit.characters is None else f"{limit.characters:,}"
    if limit.depth == 0:
        return f"| {name} | | | | {characters} | {limit.why} |"
    return (
        f"| {name} | {limit.items:,} | {limit.values:,} | {limit.depth} | {characters} "
        f"| {limit.why} |"
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
