"""Answers whose structure takes ever longer end, and others go on."""

import itertools
import pickle
import time
from pathlib import Path

import pytest
import torch
import xgrammar
from vllm.v1.structured_output import backend_xgrammar

from backend_worker.engine import slow_structures
from backend_worker.engine.slow_structures import WatchedGrammar, WatchedStructuresConfig
from tests.unit.backend_worker.configured import ours

LETTERS = xgrammar.TokenizerInfo([bytes([each]) for each in range(256)], stop_token_ids=[0])
A = ord("a")
AMBIGUOUS = 'root ::= r r r | "a"\nr ::= root r | "a" | ""'
"""Each token takes longer than the one before."""


def tokens_until_it_ends(grammar: str, most: int) -> int:
    compiled = xgrammar.GrammarCompiler(LETTERS).compile_grammar(grammar)
    state = WatchedGrammar(256, xgrammar.GrammarMatcher(compiled), compiled)
    mask = torch.zeros(1, 8, dtype=torch.int32)
    for number in range(most):
        state.fill_bitmask(mask, 0)
        if not state.accept_tokens("r", [A]):
            return number
    return most


def test_an_answer_that_takes_ever_longer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_structures, "SLOW_S", 0.001)
    monkeypatch.setattr(slow_structures, "MAX_SLOW_S", 0.01)
    assert 10 < tokens_until_it_ends(AMBIGUOUS, 2000) < 1000


def test_all_answers_of_one_request_are_counted_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = xgrammar.GrammarCompiler(LETTERS).compile_grammar('root ::= "a" root | "b"')
    mask = torch.zeros(1, 8, dtype=torch.int32)
    names = ["0_one-11111111", "1_one-11111111", "0_one.1-1-22222222", "one.2-33333333", "two-4"]
    states = {
        name: WatchedGrammar(256, xgrammar.GrammarMatcher(compiled), compiled) for name in names
    }

    def step() -> list[str]:
        """Make the masks of a step, and return whose answers go on."""
        for state in states.values():
            state.fill_bitmask(mask, 0)
        return [name for name, state in states.items() if state.accept_tokens(name, [A])]

    assert step() == names
    took = time.thread_time()
    clock = itertools.count(took, 0.15)  # of each mask and each token, as both look at it twice
    monkeypatch.setattr(slow_structures.time, "thread_time", lambda: next(clock))
    assert step() == ["two-4"]
    assert step() == ["two-4"]


def test_others_go_on() -> None:
    assert tokens_until_it_ends('root ::= "a" root | "b"', 2000) == 2000


def test_engines_have_it(model: Path) -> None:
    """An engine process has no more than this configuration."""
    settings = ours([f"--model={model}"]).structured_outputs_config
    assert isinstance(pickle.loads(pickle.dumps(settings)), WatchedStructuresConfig)
    assert backend_xgrammar.XgrammarGrammar is WatchedGrammar
