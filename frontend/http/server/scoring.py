"""Scores of items by a model that generates: tokenized in a thread, and not on the event loop.

The one file that reaches into vLLM's serving class for them.
"""

import asyncio
from typing import Any, TypeAlias

from fastapi import FastAPI

from frontend.processing import Tokenizing

Vllms: TypeAlias = Any
"""An object of vLLM's: a request, its tokenizer, a prompt."""


def tokenize_scores_aside(app: FastAPI, tokenizing: Tokenizing) -> None:
    """Let the route for scores of vLLM's app tokenize where long texts are tokenized."""
    serving = getattr(app.state, "serving_generative_scoring", None)
    if serving is None:
        return
    build = serving._build_prompts

    async def build_aside(asked: Vllms, tokenizer: Vllms, max_model_len: int) -> Vllms:
        texts = (asked.query, *asked.items)
        tokenizing.check_length(*(text for text in texts if isinstance(text, str)))
        return await tokenizing.aside(lambda: asyncio.run(build(asked, tokenizer, max_model_len)))

    serving._build_prompts = build_aside
