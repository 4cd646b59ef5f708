"""Answers whose structure takes ever longer end, and others go on."""

import itertools
import pickle
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import xgrammar
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.utils import choice_as_grammar

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
    monkeypatch.setattr(slow_structures, "LATER_SLOW_S", 0.001)
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


@pytest.mark.parametrize("at", ["mask", "token"])
def test_a_mask_or_a_token_that_does_not_end_ends_the_request_alone(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Nothing stops xgrammar, which goes on to write its mask."""
    monkeypatch.setattr(slow_structures, "DEADLINE_S", -1.0)
    monkeypatch.setattr(slow_structures, "POLL_INTERVAL_S", 0.01)
    compiled = xgrammar.GrammarCompiler(LETTERS).compile_grammar('root ::= "a" root | "b"')
    slow, other = (
        WatchedGrammar(256, xgrammar.GrammarMatcher(compiled), compiled) for _ in range(2)
    )
    slow.plain = other.plain = True  # until it is slow
    mask = torch.zeros(2, 8, dtype=torch.int32)
    for idx, state in enumerate((slow, other)):
        state.fill_bitmask(mask, idx)
        assert state.accept_tokens(f"{at}{idx}", [A])
    go_on, ended = threading.Event(), threading.Event()
    matcher = slow.matcher

    def fill(own: torch.Tensor, _: int) -> None:
        go_on.wait()
        own.zero_()
        ended.set()

    def accept(_: int) -> bool:
        go_on.wait()
        ended.set()
        return True

    slow.plain = False
    slow.matcher = MagicMock(
        wraps=matcher,
        **{"fill_next_token_bitmask": fill} if at == "mask" else {"accept_token": accept},
    )
    if at == "mask":
        slow.fill_bitmask(mask, 0)
        assert (mask[0] == -1).all()
    assert not slow.accept_tokens(f"{at}0", [A])
    slow.rollback(1)
    assert slow.validate_tokens([A]) == []
    go_on.set()
    assert ended.wait(60)
    assert at == "token" or (mask[0] == -1).all()
    slow.matcher.rollback.assert_not_called()
    other.fill_bitmask(mask, 1)
    assert other.accept_tokens(f"{at}1", [A])


def test_what_may_be_ambiguous_has_the_masks_and_errors_of_others() -> None:
    grammar = 'root ::= "a" root | "b"'
    compiled = xgrammar.GrammarCompiler(LETTERS).compile_grammar(grammar)
    masks = torch.zeros(2, 8, dtype=torch.int32)
    states = [WatchedGrammar(256, xgrammar.GrammarMatcher(compiled), compiled) for _ in range(2)]
    states[0].plain = True
    for _ in range(3):
        for idx, state in enumerate(states):
            state.fill_bitmask(masks, idx)
            assert state.accept_tokens(f"same{idx}", [A])
        assert masks[0].equal(masks[1])
    for idx, state in enumerate(states):
        with pytest.raises(TypeError):
            state.accept_tokens(f"same{idx}", ["a"])  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM names max_rollback_tokens
@pytest.mark.parametrize(
    ("kind", "text", "plain"),
    [
        (StructuredOutputOptions.JSON, '{"type": "string"}', True),
        (StructuredOutputOptions.JSON, '{"type": "string", "pattern": "a"}', False),
        (StructuredOutputOptions.JSON, '{"type": "string", "p\\u0061ttern": "a"}', False),
        (StructuredOutputOptions.REGEX, "a+", False),
        (StructuredOutputOptions.GRAMMAR, choice_as_grammar(["a", 'b" | c', "\\"]), True),
        (StructuredOutputOptions.GRAMMAR, 'root ::= "a" | root "b"', False),
        (StructuredOutputOptions.GRAMMAR, 'root ::= "a"*', False),
    ],
)
def test_choices_and_json_without_patterns_need_no_thread(
    kind: StructuredOutputOptions, text: str, plain: bool
) -> None:
    backend = object.__new__(backend_xgrammar.XgrammarBackend)
    backend.compiler = xgrammar.GrammarCompiler(LETTERS)
    backend.disable_any_whitespace, backend.vocab_size = False, 256
    backend.num_speculative_tokens = 0
    assert backend.compile_grammar(kind, text, stop_token_ids={0}).plain == plain


def test_later_masks_that_take_longer_than_the_first_ones_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Digits come first, and hide what is ambiguous from a trial."""
    monkeypatch.setattr(slow_structures, "EARLY", 1)
    monkeypatch.setattr(slow_structures, "LATER_SLOW_S", 0.0)
    monkeypatch.setattr(slow_structures, "MAX_SLOW_S", 0.001)
    assert tokens_until_it_ends('root ::= "a" root | "b"', 100_000) < 100_000


def test_others_go_on() -> None:
    assert tokens_until_it_ends('root ::= "a" root | "b"', 2000) == 2000


def test_engines_have_it(model: Path) -> None:
    """An engine process has no more than this configuration."""
    settings = ours([f"--model={model}"]).structured_outputs_config
    assert isinstance(pickle.loads(pickle.dumps(settings)), WatchedStructuresConfig)
    assert backend_xgrammar.XgrammarGrammar is WatchedGrammar
