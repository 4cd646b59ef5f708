"""Bodies of requests: a few parts, and options with values that nobody would send."""

import random
from collections.abc import Mapping, Sequence

from tests.families.fuzz.parts import SPECIAL, part

Table = Mapping[str, Sequence[object]]

HUGE = 10**12
NAN, INFINITE = float("nan"), float("inf")

SAMPLING: Table = {
    "max_tokens": (0, 1, 2, -1, HUGE, 2**31, 2**63, None, 1.5),
    "max_completion_tokens": (0, 1, -1, HUGE, None),
    "min_tokens": (0, 1, 5, -1, HUGE),
    "temperature": (0, 1, 2, -1, 1e30, 1e-30, NAN),
    "top_p": (0, 1e-9, 0.5, 1, 2, -1, NAN),
    "top_k": (-1, 0, 1, 5, -2, 2**31, HUGE),
    "min_p": (0, 0.5, 1, 2, -1),
    "n": (0, 1, 2, 5, -1, 10_000, HUGE),
    "seed": (0, -1, 2**31, 2**63, 2**64, 2**70, -(2**63)),
    "logprobs": (True, False, 5, -1),
    "top_logprobs": (0, 1, 20, 21, -1, 10**6, None),
    "prompt_logprobs": (0, 1, -1, 5, 10**6),
    "presence_penalty": (0, 2, -2, 1e9, NAN),
    "frequency_penalty": (0, 2, -2, 1e9),
    "repetition_penalty": (1, 0, -1, 1e30, 1e-30, NAN, INFINITE),
    "logit_bias": (
        {}, {"5": 100}, {"-1": 1}, {"999999999": 5}, {"5": 1e40}, {"767": 1}, {"768": 1},
        {"800": 1}, {"a": 1}, {"5": None}, {str(2**40): 1},
    ),
    "stop": ("a", "", [], ["a", ""], ["x" * 10_000], ["e"] * 50, [1], "\x00"),
    "stop_token_ids": ([5], [-1], [10**10], [2**63], [], ["a"], list(range(1000))),
    "allowed_token_ids": ([5], [], [-1], [10**9], [767], [768], [800], list(range(768))),
    "bad_words": ([""], ["a"], [" "], ["x" * 5000], ["\x00"], ["<|image_pad|>"]),
    "ignore_eos": (True, False),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "truncate_prompt_tokens": (-1, 0, 1, 5, -2, HUGE),
    "priority": (0, -1, 1, 2**31, 2**63, 10**30),
    "cache_salt": ("a", "", "x" * 10_000, 5),
    "echo": (True,),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
    "add_special_tokens": (True, False),
    "length_penalty": (0, 1, -1),
    "use_beam_search": (True,),
    "best_of": (1, 3, -1),
    "documents": ([], [{"title": "a", "text": "b"}], 5),
    "chat_template_kwargs": ({}, {"enable_thinking": True}, {"tools": 5}, {"messages": []}),
    "kv_transfer_params": ({}, {"do_remote_prefill": True}, {"a": 1}),
    "ec_transfer_params": ({}, {"a": 1}),
    "vllm_xargs": ({}, {"a": 1}, {"a": "x" * 5000}),
    "repetition_detection": (
        {"max_pattern_size": 0}, {"max_pattern_size": -1, "min_count": 0},
        {"max_pattern_size": HUGE},
    ),
    "thinking_token_budget": (0, -1, 1, HUGE),
    "reasoning_effort": ("low", "none"),
    "user": ("x" * 1000,),
    "request_id": ("same", "", "x" * 5000),
}  # fmt: skip

FORMATS: Table = {
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "structural_tag", "structures": [], "triggers": []},
    ),
    "structured_outputs": (
        {"regex": "[ab]{1,3}"}, {"regex": "(((("}, {"regex": "(a{1000}){1000}"}, {"regex": ""},
        {"regex": "a{0}"}, {"regex": "(?!a)"}, {"regex": "\\d{99999}"},
        {"choice": ["a", "b"]}, {"choice": []}, {"choice": [""]}, {"choice": ["a"] * 3000},
        {"choice": ["\x00"]},
        {"grammar": "root ::= root"}, {"grammar": 'root ::= "a"'}, {"grammar": ""},
        {"grammar": 'root ::= "a" root | root'}, {"grammar": "nothing"},
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": "{"}, {"json": {"type": "string", "pattern": "((("}}, {"json": True},
        {"json": {"type": "integer", "minimum": 5, "maximum": 1}}, {"json": {"enum": []}},
        {"json": {"type": "string", "minLength": HUGE}}, {"json": {"not": {}}},
        {"json": {"type": "array", "minItems": 100_000}}, {"json_object": True},
        {"structural_tag": "{}"}, {"structural_tag": "nothing"},
        {"regex": "a", "choice": ["a"]}, {"disable_any_whitespace": True},
        {"whitespace_pattern": "((("},
    ),
}  # fmt: skip

MEDIA: Table = {
    "mm_processor_kwargs": (
        {}, {"min_pixels": 0}, {"min_pixels": -1}, {"min_pixels": HUGE}, {"max_pixels": 0},
        {"max_pixels": 1}, {"max_pixels": -5}, {"max_pixels": 1e300}, {"max_pixels": "a"},
        {"min_pixels": 10**6, "max_pixels": 10}, {"size": {}}, {"size": 5},
        {"size": {"shortest_edge": 0, "longest_edge": 0}},
        {"size": {"shortest_edge": 28, "longest_edge": 28}}, {"size": {"longest_edge": 1}},
        {"size": {"height": 1, "width": 1}}, {"size": {"longest_edge": 5000}},
        {"do_resize": False}, {"do_rescale": False}, {"do_normalize": False},
        {"do_convert_rgb": False}, {"patch_size": 0}, {"patch_size": 7}, {"patch_size": 28},
        {"merge_size": 0}, {"merge_size": 1}, {"merge_size": 3}, {"temporal_patch_size": 0},
        {"temporal_patch_size": 1}, {"temporal_patch_size": 3}, {"image_mean": []},
        {"image_std": [0, 0, 0]}, {"image_mean": [1e38] * 3}, {"rescale_factor": 1e38},
        {"rescale_factor": NAN}, {"fps": 0}, {"fps": -1}, {"fps": 1e9}, {"num_frames": -1},
        {"num_frames": 0}, {"num_frames": 1}, {"num_frames": HUGE}, {"do_sample_frames": True},
        {"use_audio_in_video": True}, {"sampling_rate": 0}, {"sampling_rate": 8000},
        {"padding": False}, {"truncation": True, "max_length": 1}, {"max_length": 0},
        {"return_tensors": "np"}, {"device": "cuda"}, {"do_image_splitting": False},
        {"max_image_size": {"longest_edge": 1}}, {"max_image_size": {"longest_edge": 14}},
        {"seconds_per_chunk": 0}, {"position_id_per_seconds": 0}, {"nothing": 1},
        {"text": "x"}, {"images": []}, {"image_grid_thw": [[1, 1, 1]]}, {"interpolation": 99},
        {"resample": 99}, {"data_format": "channels_last"}, {"input_data_format": "nothing"},
        {"crop_size": {"height": 1, "width": 1}}, {"do_center_crop": True}, 5,
    ),
    "media_io_kwargs": (
        {}, {"video": {"num_frames": 0}}, {"video": {"num_frames": -1}},
        {"video": {"num_frames": 1}}, {"video": {"num_frames": HUGE}}, {"video": {"fps": 0}},
        {"video": {"fps": -5}}, {"video": {"fps": 1e9}}, {"image": {"image_mode": "L"}},
        {"image": {"image_mode": "nothing"}}, {"image": {"rgba_background_color": [0]}},
        {"audio": {"sampling_rate": 0}}, {"video": {"video_backend": "nothing"}}, {"nothing": {}},
        5,
    ),
}  # fmt: skip

PROMPTS: Sequence[object] = (
    "river", "", ["a", "b"], [], [1, 2, 3],
    [[1], [2]],
    [-1], [10**9], [767], [768], [2**63], [[]], ["a"] * 20, list(range(700)) * 7,
)  # fmt: skip


def chat(draw: random.Random) -> dict[str, object]:
    """The body of a chat request."""
    messages = [
        {"role": draw.choice((*["user"] * 12, "system", "assistant", "tool", "nobody")),
         "content": [part(draw) for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 6)))]}
        for _ in range(draw.choice((0, *[1] * 12, 2, 3)))
    ]  # fmt: skip
    return {"model": "demo", "messages": messages} | options(draw, SAMPLING, FORMATS, MEDIA)


def completion(draw: random.Random) -> dict[str, object]:
    """The body of a request for a completion, by tokens too."""
    prompt = draw.choice((*PROMPTS, " ".join(draw.choices(SPECIAL, k=5))))
    return {"model": "demo", "prompt": prompt} | options(draw, SAMPLING, FORMATS)


def options(draw: random.Random, *tables: Table) -> dict[str, object]:
    """A few, mostly short answers."""
    chosen: dict[str, object] = {"max_tokens": draw.choice((1, 2, 4)), "temperature": 0}
    if draw.random() < 0.3:
        chosen["stream"] = True
    return chosen | few(draw, *tables)


def few(draw: random.Random, *tables: Table) -> dict[str, object]:
    """Up to two fields of each table."""
    chosen: dict[str, object] = {}
    for table in tables:
        names = list(table)
        for name in draw.sample(names, min(len(names), draw.choice((0, 0, 0, 0, 1, 2)))):
            chosen[name] = draw.choice(table[name])
    return chosen
