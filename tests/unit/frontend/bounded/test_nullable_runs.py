"""The longest run of parts that may be empty, in grammars as xgrammar writes them."""

import json

import pytest
import xgrammar

from frontend.bounded.nullable_runs import longest_run

OPTIONAL = {f"p{n}": {"type": "string", "maxLength": 500} for n in range(300)}


@pytest.mark.parametrize(
    ("grammar", "run"),
    [
        (xgrammar.Grammar.from_regex("x" * 500 + "(a*)*" * 40 + "y"), 40),
        (xgrammar.Grammar.from_regex("(a?b?c?[d-f]*){3}x|y?"), 4),
        (xgrammar.Grammar.from_regex(r'[\]"(]?"\\"?[^\\\]]?'), 2),
        (xgrammar.Grammar.from_ebnf('root ::= "a" b b c b\nb ::= c c\nc ::= "" | "d"'), 4),
        (xgrammar.Grammar.from_ebnf('root ::= b b "c"\nb ::= b "a" | "a"'), 0),
        (xgrammar.Grammar.from_json_schema(json.dumps({"properties": OPTIONAL})), 2),
    ],
    ids=["behind a text", "repeated", "characters", "of rules", "none", "schema"],
)
def test_runs_are_counted(grammar: xgrammar.Grammar, run: int) -> None:
    assert longest_run(str(grammar)) == run
