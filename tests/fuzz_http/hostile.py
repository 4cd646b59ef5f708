"""Values that nobody would write: each is some JSON text, says its shape, and can be smaller."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from tests.fuzz_http import canaries

LITERALS: Final = (
    "null", "true", "false", "0", "1", "2", "-1", "16384", "4294967296", "0.5", "1e308", "1e-308",
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "-9223372036854775809", "1" + "0" * 300,
    '""', '" "', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\\ufeff"', '"%n%s{0}"', '"[]"',
    "[]", "{}", "[[]]", "[{}]", "[null]", '[""]', '{"":""}', '{"type":null}', '{"type":["text"]}',
    '"auto"', '"none"', '"required"', '"text"', '"json_object"', '"<|im_start|>"', '"{{ 1 }}"',
)  # fmt: skip
"""Small, and wrong in many places."""

NUMBERS: Final = (
    "-1", "0", "1", "2", "3", "5", "20", "64", "256", "1000", "1024", "2047", "2048", "16384",
    "65535", "1048576", "2147483647", "2147483648", "9223372036854775807", "0.0001", "0.5", "1.5",
)  # fmt: skip
"""Those that a field of numbers may take for good."""

UNITS: Final = (
    "1", "0", "-1", "null", '"a"', '""', "[]", "{}", "[1,2,3]", '["a"]', "1e400",
    '{"role":"user","content":"x"}',
    '{"role":"user","content":[{"type":"text","text":1}]}',
    '{"role":"assistant","content":[{"type":"output_text","text":"x"}]}',
    '{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]}',
    '{"role":"tool","tool_call_id":"a","content":"x"}',
    '{"type":"text","text":"x"}',
    '{"type":"image_url","image_url":{"url":"x"}}',
    '{"type":"image_url","image_url":{"url":"data:image/png;base64,"}}',
    '{"type":"function","function":{"name":"f","parameters":{}}}',
    '{"type":"function","name":"f","parameters":{"type":"object","properties":{"a":{"anyOf":[{},{}]}}}}',
    '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}',
    '{"type":"tool_use","id":"a","name":"f","input":{}}',
)  # fmt: skip
"""What lists are filled with."""

WORDS: Final = (
    "x", "a b ", "\\n", "\\u0000", "\\ud83d\\ude00", "<|im_start|>", "word ", "9", "(", "{", "[",
    "(a|b)*", "e\\u0301", "%25", "AAAA", "data:image/png;base64,", "<tool_call>",
    "<|vision_start|><|image_pad|><|vision_end|>", "{% for i in range(9) %}", "((((", "\\\\",
    "\\n ", "/a", "<", "- ", "a.", "|", "`", "#", "$", "x\\n\\n", "a=", "\\ufdfa",
)  # fmt: skip
"""What texts are filled with, as JSON has them."""


@dataclass(frozen=True)
class Value:
    """A hostile value.

    Attributes:
        kind: of ``KINDS``.
        unit: what is repeated.
        size: how often.
    """

    kind: str
    unit: str = ""
    size: int = 1

    @property
    def text(self) -> str:
        return KINDS[self.kind](self.unit, self.size)

    @property
    def shape(self) -> str:
        """What it is, in few words."""
        if self.kind == "literal":
            return self.unit[:60]
        return f"{self.kind} of {self.size:,} x {self.unit[:60]}"

    def smaller(self) -> Iterator["Value"]:
        """Yield values to try instead, the smallest first."""
        if self.kind != "literal":
            for size in sorted({0, 1, self.size // 8, self.size // 2, self.size * 3 // 4}):
                if size < self.size:
                    yield replace(self, size=size)
            if len(self.text) > 3:
                yield Value("literal", '"x"')


KINDS: Final[Mapping[str, Callable[[str, int], str]]] = {
    "literal": lambda unit, size: unit,
    "list": lambda unit, size: f"[{','.join([unit] * size)}]",
    "object": lambda unit, size: "{" + ",".join(f'"k{n}":{unit}' for n in range(size)) + "}",
    "text": lambda unit, size: f'"{unit * size}"',
    "list of texts": lambda unit, size: f'["{unit * size}","{unit * size}x"]',
    "number": lambda unit, size: "9" * max(1, size),
    "lists in lists": lambda unit, size: "[" * size + "]" * size,
    "objects in objects": lambda unit, size: f'{{"{unit}":' * size + "1" + "}" * size,
    "schemas in schemas": lambda unit, size: (
        '{"anyOf":[' * size + '{"type":"string"}' + "]}" * size
    ),
    "properties": lambda unit, size: (
        '{"type":"object","properties":{'
        + ",".join(f'"p{n}":{{"type":"string","enum":["a","b"]}}' for n in range(size))
        + "}}"
    ),
    "alternatives": lambda unit, size: (
        '{"anyOf":[' + ",".join(f'{{"const":"{n}"}}' for n in range(size)) + "]}"
    ),
}
"""How a kind becomes text, of a unit and a size."""

_SIZES: Final = (10, 1000, 30_000, 200_000, 990_000)
"""Bytes, about."""

_COUNTS: Final = (1, 2, 16, 255, 512, 1024, 2047, 16_000, 65_000, 260_000)
"""How many of something there may be, just below what limits often are."""

_TEXTS: Final = ("text", "list of texts")
_LISTS: Final = ("list", "object")
_NESTED: Final = (
    "objects in objects", "schemas in schemas", "properties", "alternatives", "lists in lists"
)  # fmt: skip
_NAMES: Final = ("a", "anyOf", "items", "properties", "content", "$ref")
_OF_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("text",),
    "array": ("list", "list", "list of texts"),
    "object": ("object", *_NESTED),
}


def draw(random: Random, kind: str = "", units: tuple[str, ...] = ()) -> Value:
    """Draw one.

    Args:
        kind: of JSON's types, that fits the place; any by default.
        units: of JSON, that fit the place.
    """
    if kind in ("integer", "number"):
        return Value("literal", random.choice(NUMBERS))
    if kind == "boolean":
        return Value("literal", random.choice(("true", "false")))
    if kind == "string" and random.random() < 0.3:
        return Value("literal", json.dumps(random.choice(canaries.TEXTS)))
    if not kind and random.random() < 0.5:
        return Value("literal", random.choice(LITERALS))
    shape = random.choice(_OF_TYPE.get(kind) or [*KINDS][1:])
    if shape in _TEXTS:
        unit = random.choice(WORDS)
    elif shape in _LISTS:
        unit = random.choice((*UNITS, *units * 24))
    else:
        unit = random.choice(_NAMES)
    each = len(KINDS[shape](unit, 2)) // 2 + 8
    size = random.choice((random.choice(_COUNTS), random.choice(_SIZES) // each))
    return Value(shape, unit, max(1, min(size, _SIZES[-1] // each)))
