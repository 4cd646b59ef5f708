"""Makes a tiny Qwen2-VL with random weights, for trying mmrouter where no model hub is reachable.

    python examples/demo_model.py DIRECTORY

It says nothing sensible, but what it says depends on every image and every word of the prompt: a
wrong image, or a wrong cache hit, changes the tokens. Same recipe, same weights, on any machine.
The directory appears complete or not at all, and is left alone when this recipe already made it.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

HIDDEN = 128
HEADS = 2  # of 64: vLLM's attention on CPU does not take 16
LAYERS = 3
VISION_LAYERS = 2
MAX_POSITIONS = 32768
VOCABULARY = 768
PATCH, MERGE = 14, 2
MARKER = "recipe.json"

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# What the byte-pair merges are learnt from: enough for ordinary words to be one or two tokens.
CORPUS = """
Describe the picture in a few words. What colour is the square on the left, and what is behind it?
There are two images here: the first one shows a red circle, the second one shows a blue triangle.
How many shapes can you count? Please answer with yes or no. Compare both images and say which one
is larger, darker or closer to the top. The weather in Paris today is sunny with a light wind from
the north, and the temperature is about twenty degrees. You are a helpful assistant who looks at
images, reads the text inside them and explains what they mean. A small green house stands under a
tall old tree near the river; three white birds fly over the yellow field. Write a short story that
begins with the words "once upon a time". The user asks a question, the assistant gives an answer.
Every worker keeps the blocks it has computed, so that the same prefix need not be computed again.
{"name": "get_weather", "arguments": {"city": "Berlin", "unit": "celsius"}} [1, 2, 4.5, true, null]
system user assistant tool image video picture 0 1 2 3 4 5 6 7 8 9 10 100 1000 hello world thank you
Who, when, where, why and how? One, two, three, four, five, six, seven, eight, nine, ten, eleven.
"""

CHAT_TEMPLATE = """\
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is not none -%}
    {%- for part in content -%}
      {%- if part.type in ('image', 'image_url') or 'image' in part -%}
        <|vision_start|><|image_pad|><|vision_end|>
      {%- elif part.type in ('video', 'video_url') or 'video' in part -%}
        <|vision_start|><|video_pad|><|vision_end|>
      {%- elif 'text' in part -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set first_is_system = messages and messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' -}}
{%- if first_is_system -%}
  {{- render(messages[0].content) -}}
{%- else -%}
  {{- 'You are a helpful assistant.' -}}
{%- endif -%}
{%- if tools -%}
  {{- '\\n\\nThese functions can be called:\\n' -}}
  {%- for tool in tools -%}
    {{- tool | tojson + '\\n' -}}
  {%- endfor -%}
  {{- 'Write a call as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>' -}}
    {{- render(message.content) -}}
    {{- '</tool_response><|im_end|>\\n' -}}
  {%- elif not (loop.first and first_is_system) -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {{- render(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '<tool_call>{"name": "' + function.name + '", "arguments": ' -}}
      {%- if function.arguments is string -%}
        {{- function.arguments -}}
      {%- else -%}
        {{- function.arguments | tojson -}}
      {%- endif -%}
      {{- '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def recipe() -> str:
    """Identifies what this file makes, so that a directory made by another version is remade."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def is_complete(directory: Path) -> bool:
    try:
        return json.loads((directory / MARKER).read_text())["recipe"] == recipe()
    except (OSError, ValueError, KeyError):
        return False


def make_tokenizer():
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS) - len(PLAIN_ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator([line.strip() + "\n" for line in CORPUS.splitlines()], trainer)
    learnt = json.loads(learner.to_str())["model"]

    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED_TOKENS]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_processor(tokenizer):
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    unit = PATCH * MERGE
    # 1024x1024 is rounded up to 37 units a side; smaller than 2 units a side is enlarged.
    size = {"shortest_edge": (2 * unit) ** 2, "longest_edge": (37 * unit) ** 2}
    geometry = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "size": size}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**geometry),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**geometry),
        chat_template=CHAT_TEMPLATE,
    )


def make_config(tokenizer):
    from transformers import Qwen2VLConfig

    ids = dict(zip(SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS), strict=True))
    return Qwen2VLConfig(
        architectures=["Qwen2VLForConditionalGeneration"],
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [8, 12, 12],
            },
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": VISION_LAYERS,
            "embed_dim": HIDDEN,
            "hidden_size": HIDDEN,
            "num_heads": HEADS,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )


# How many times the usual 1/sqrt(fan-in) a weight is drawn at; the first name contained wins.
# Attention reaches far back with some contrast (q, k), and what it brings outweighs the last
# token's own embedding (v, o), so the answer follows the whole prompt. The best token then wins by
# about one (lm_head), which is far above what rounding or another order of summation changes.
GAINS = {
    "visual": 1.5,
    "q_proj": 1.9,
    "k_proj": 1.9,
    "v_proj": 1.7,
    "o_proj": 1.7,
    "lm_head": 4.0,
}
# How strongly lm_head turns against the last token's embedding; without it greedy answers end in
# one token repeated for ever, in which a wrong image would go unnoticed.
REPETITION_AVERSION = 2.0


def never_worth_saying(tokenizer) -> list[int]:
    """Ids of what is not legible: special tokens, control characters, pieces of characters."""
    special = set(tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS + PLAIN_ADDED_TOKENS))
    return [
        token
        for token in range(len(tokenizer))
        if token in special
        or not (text := tokenizer.decode([token])).isascii()
        or not text.isprintable()
    ]


def make_model(config, tokenizer):
    import torch
    from transformers import Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # One generator for each weight, so that none depends on the order of the others.
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            generator = torch.Generator().manual_seed(seed)
            if "norm" in name or "ln_q" in name:
                weight.fill_(1.0 if name.endswith("weight") else 0.0)
            elif weight.ndim == 1:
                weight.normal_(0.0, 0.02, generator=generator)
            elif "embed_tokens" in name:
                weight.normal_(0.0, 1.0, generator=generator)
            else:
                gain = next((value for key, value in GAINS.items() if key in name), 1.0)
                fan_in = weight[0].numel()
                weight.normal_(0.0, gain * fan_in**-0.5, generator=generator)
        embedding = model.model.language_model.embed_tokens.weight
        model.lm_head.weight -= REPETITION_AVERSION * HIDDEN**-0.5 * embedding
        model.lm_head.weight[never_worth_saying(tokenizer)] *= 0.01
    return model


def write(directory: Path) -> None:
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    config = make_config(tokenizer)
    make_model(config, tokenizer).save_pretrained(directory)
    make_processor(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=config.text_config.bos_token_id,
        eos_token_id=config.text_config.eos_token_id,
        pad_token_id=config.text_config.pad_token_id,
    ).save_pretrained(directory)
    (directory / MARKER).write_text(json.dumps({"recipe": recipe()}) + "\n")


def put_in_place(made: Path, directory: Path) -> None:
    """Renames ``made`` to ``directory``; an older model of ours there makes room."""
    if (directory / MARKER).exists():
        aside = made.with_name(made.name + ".old")
        directory.rename(aside)
        shutil.rmtree(aside)
    try:
        made.rename(directory)
    except OSError:
        # Someone else finished first, or the directory holds something that is not ours.
        if not is_complete(directory):
            raise
        shutil.rmtree(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory.absolute()
    if is_complete(directory):
        print(f"{directory}: already made")
        return 0
    if directory.exists() and not (directory / MARKER).exists() and any(directory.iterdir()):
        print(f"{directory}: not empty and not made by this script; left alone", file=sys.stderr)
        return 1

    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        made.chmod(0o755)
        write(made)
        put_in_place(made, directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    print(f"{directory}: made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
