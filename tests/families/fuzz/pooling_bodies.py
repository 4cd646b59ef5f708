"""Bodies of requests that pool: inputs of all shapes, and options with values that nobody sends."""

import random
from collections.abc import Callable

from tests.families.fuzz.bodies import HUGE, MEDIA, PROMPTS, Table, few
from tests.families.fuzz.parts import part

Draw = random.Random
Body = dict[str, object]

COMMON: Table = {
    "truncate_prompt_tokens": (-1, 0, 1, 5, -2, HUGE),
    "truncation_side": ("left", "right", "nothing"),
    "padding": ("max_length", "do_not_pad", "nothing"),
    "priority": (0, -1, 2**31, 2**63),
    "cache_salt": ("a", "", "x" * 10_000, 5),
    "request_id": ("same", "", "x" * 5000),
    "add_special_tokens": (True, False),
    "use_activation": (True, False, 5),
    "dimensions": (0, 1, 64, 128, 129, -1, HUGE),
    "encoding_format": ("float", "base64", "bytes", "bytes_only", "nothing"),
    "embed_dtype": ("float32", "float16", "bfloat16", "fp8_e4m3", "nothing"),
    "endianness": ("native", "big", "little", "nothing"),
    "normalize": (True,),
    "user": ("x" * 1000,),
    "model": ("nobody", ""),
}  # fmt: skip

TASKS: Table = {
    "task": (
        "embed", "classify", "score", "token_embed", "token_classify", "plugin", "encode", "x", 5,
    ),
    "data": ("a", {}, None),
}  # fmt: skip

PAIRS: Table = {
    "max_tokens_per_query": (0, 1, -1, HUGE),
    "max_tokens_per_doc": (0, 1, -1, HUGE),
    "instruction": ("x", "x" * 5000),
    "top_n": (0, 1, -1, HUGE),
    "chat_template_kwargs": ({}, {"messages": []}),
}


def _messages(draw: Draw) -> object:
    content = [part(draw) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
    one: list[Body] = [{"role": draw.choice(("user", "user", "nobody")), "content": content}]
    return [one, one] if draw.random() < 0.2 else one


def _input(draw: Draw) -> Body:
    if draw.random() < 0.6:
        return {"messages": _messages(draw)}
    return {"input": draw.choice(PROMPTS)}


def _document(draw: Draw) -> object:
    if draw.random() < 0.5:
        return {"content": [part(draw) for _ in range(draw.choice((0, 1, 1, 2)))]}
    return draw.choice(("river", "", "x" * 5000, [1, 2], 5, None, "<|image_pad|>"))


def _embeddings(draw: Draw) -> Body:
    return _input(draw) | few(draw, COMMON, MEDIA)


def _pooling(draw: Draw) -> Body:
    return _input(draw) | few(draw, COMMON, TASKS, MEDIA)


def _pairs(draw: Draw) -> Body:
    documents = [_document(draw) for _ in range(draw.choice((0, 1, 2, 5)))]
    names = draw.choice((("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")))
    query: object = _document(draw)
    if draw.random() < 0.2:
        query = [query] * draw.choice((1, 2, 5))
    return {names[0]: query, names[1]: documents} | few(draw, COMMON, PAIRS, MEDIA)


def _ranking(draw: Draw) -> Body:
    documents = [_document(draw) for _ in range(draw.choice((0, 1, 2, 5)))]
    return {"query": _document(draw), "documents": documents} | few(draw, COMMON, PAIRS, MEDIA)


def _cohere(draw: Draw) -> Body:
    kinds = {
        "texts": ["a", "b"], "images": ["data:image/png;base64,AAAA"],
        "inputs": [{"content": [part(draw)]}],
    }  # fmt: skip
    body: Body = {name: kinds[name] for name in draw.sample(list(kinds), draw.choice((0, 1, 2)))}
    body["input_type"] = draw.choice(("search_query", "image", "nothing", None))
    body["embedding_types"] = draw.choice((["float"], ["int8"], ["nothing"], [], None))
    body["truncate"] = draw.choice(("NONE", "END", "START", "nothing"))
    return body | few(draw, {"output_dimension": COMMON["dimensions"]})


MAKERS: dict[str, Callable[[Draw], Body]] = {
    "/v1/embeddings": _embeddings,
    "/pooling": _pooling,
    "/classify": _pooling,
    "/score": _pairs,
    "/v1/rerank": _ranking,
    "/v2/embed": _cohere,
}


def pooling(draw: Draw) -> tuple[str, Body]:
    """A path and a body."""
    path = draw.choice(list(MAKERS))
    return path, {"model": "demo"} | MAKERS[path](draw)
