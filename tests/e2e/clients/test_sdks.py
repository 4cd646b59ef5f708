"""Each SDK gets from the frontend what it gets from a plain vLLM: the same answers, streams of the
same shape, and for what is wrong an exception of the same class with the same words."""

from typing import TypeAlias

import pytest

from tests.e2e.clients.programs import anthropic_sdk, openai_sdk
from tests.e2e.clients.programs.outcomes import Endpoint, Outcome
from tests.e2e.clients.running import run_program

Both: TypeAlias = tuple[dict[str, Outcome], dict[str, Outcome]]

OWN_WORDS = {
    # The frontend fetches media itself and says more of what went wrong.
    "a_picture_that_is_not_there",
    "a_picture_by_ftp",
    "a_picture_of_no_url",
    "a_broken_picture",
    "a_stream_about_a_broken_picture",
    "a_response_about_a_broken_picture",
    "an_asynchronous_error",
    # A wrong part is not repeated, since it may have megabytes.
    "an_unknown_part",
    "a_film_for_who_sees_pictures",
    # What is not there says what is.
    "a_method_that_is_not_there",
    "a_path_that_is_not_there",
    "a_picture_to_make",
    "a_response_that_nobody_kept",
    "embeddings",
    "no_such_model",
}
"""In the same exception."""

TOO_LONG = {"a_question_that_is_too_long", "a_stream_whose_question_is_too_long"}
"""``code`` says so here, as OpenAI's does."""

BETTER: dict[str, Outcome] = {
    "one_model": {"answer": "demo"},
    "a_response_after_one_that_nobody_kept": {"raised": "BadRequestError", "status": 400},
}
"""What a plain vLLM has no answer to, or another exception."""


@pytest.fixture(scope="module")
def by_openai(ours: Endpoint, theirs: Endpoint) -> Both:
    return openai_sdk.case.outcomes(ours), openai_sdk.case.outcomes(theirs)


@pytest.fixture(scope="module")
def by_anthropic(ours: Endpoint, theirs: Endpoint) -> Both:
    return anthropic_sdk.case.outcomes(ours), anthropic_sdk.case.outcomes(theirs)


@pytest.mark.parametrize("name", openai_sdk.case.table)
def test_openai(by_openai: Both, name: str) -> None:
    assert_same(name, by_openai[0][name], by_openai[1][name])


@pytest.mark.parametrize("name", anthropic_sdk.case.table)
def test_anthropic(by_anthropic: Both, name: str) -> None:
    """All errors of ours have Anthropic's types, which differ from those of vLLM 0.32."""
    mine, other = by_anthropic[0][name], by_anthropic[1][name]
    assert worded(mine) == worded(other)


def assert_same(name: str, mine: Outcome, other: Outcome) -> None:
    if name in BETTER:
        assert worded(mine) == BETTER[name] != worded(other)
        return
    if name in TOO_LONG:
        mine, other = worded(mine), worded(other)
    if name in OWN_WORDS:
        assert mine["message"] != other["message"], "take it off OWN_WORDS"
        mine, other = worded(mine), worded(other)
    assert mine == other


def worded(outcome: Outcome) -> Outcome:
    words = ("message", "param", "code", "type")
    return {name: value for name, value in outcome.items() if name not in words}


def test_what_is_wrong_is_raised_and_what_is_right_answered(by_openai: Both) -> None:
    """Both servers could be wrong in the same way."""
    outcomes = by_openai[0]
    wanted = {
        "an_unknown_model": "NotFoundError",
        "a_question_that_is_too_long": "BadRequestError",
        "a_broken_picture": "BadRequestError",
        "a_stream_about_a_broken_picture": "BadRequestError",
        "a_picture_that_is_not_there": "UnprocessableEntityError",
        "too_many_pictures": "BadRequestError",
        "an_answer_that_takes_too_long": "APITimeoutError",
    }
    assert {name: outcomes[name]["raised"] for name in wanted} == wanted
    answered = ("text", "a_picture", "a_tool", "a_structured_answer", "a_response_in_a_stream")
    assert all("answer" in outcomes[name] for name in answered), outcomes


def test_openai_2(by_openai: Both, ours: Endpoint) -> None:
    """The version that LangChain and LiteLLM bring sees the same as the one that vLLM brings."""
    report = run_program("openai_sdk", {"ours": ours})
    assert report.versions["openai"].startswith("2.")
    assert report.outcomes["ours"] == by_openai[0]


@pytest.mark.parametrize("program", ["langchain_chat", "litellm_sdk"])
def test_other_clients(program: str, ours: Endpoint, theirs: Endpoint) -> None:
    outcomes = run_program(program, {"ours": ours, "theirs": theirs}).outcomes
    for name, outcome in outcomes["ours"].items():
        print(name, outcome)
    own_words = {*TOO_LONG, "a_broken_picture", "a_broken_picture_in_a_stream"}
    for name, outcome in outcomes["ours"].items():
        other = outcomes["theirs"][name]
        if name in own_words:
            outcome, other = worded(outcome), worded(other)
        if name in TOO_LONG:  # LangChain has an exception of its own for that code
            assert "raised" in outcome and "raised" in other
            continue
        assert outcome == other
    wrong = {name for name, outcome in outcomes["ours"].items() if "raised" in outcome}
    assert (
        wrong
        == {
            "langchain_chat": {
                "a_broken_picture",
                "a_broken_picture_in_a_stream",
                "a_question_that_is_too_long",
                "an_unknown_model",
            },
            "litellm_sdk": {
                "a_broken_picture",
                "a_broken_picture_in_a_stream",
                "a_question_that_is_too_long",
                "an_answer_that_takes_too_long",
                "an_unknown_model",
            },
        }[program]
    )
