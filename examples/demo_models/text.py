"""What the families share of text: a small vocabulary, and a chat template.

A family chooses its special tokens, and what stands in a prompt for each kind of media.
"""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_POSITIONS = 32768
VOCABULARY = 768

CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
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
        IMAGE
      {%- elif part.type in ('video', 'video_url') or 'video' in part -%}
        VIDEO
      {%- elif part.type in ('audio', 'input_audio', 'audio_url') or 'audio' in part -%}
        AUDIO
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


def chat_template(image: str, video: str = "", audio: str = "") -> str:
    """A chat template that writes these for media; nothing for those a family doesn't take."""
    template = CHAT_TEMPLATE
    for name, placeholder in (("IMAGE", image), ("VIDEO", video), ("AUDIO", audio)):
        template = template.replace(f"        {name}\n", f"        {placeholder}\n")
    return template


def make_tokenizer(
    media_tokens: tuple[str, ...], template: str, **named_tokens: str
) -> "PreTrainedTokenizerBase":
    """A byte-level BPE tokenizer.

    Args:
        media_tokens: special tokens beside those of the chat.
        named_tokens: attributes by which a processor finds some of them.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    special = CHAT_TOKENS + media_tokens
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(special) - len(PLAIN_ADDED_TOKENS),
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
        extra_special_tokens=named_tokens,
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED_TOKENS]
    )
    tokenizer.chat_template = template
    return tokenizer


def token_ids(tokenizer: "PreTrainedTokenizerBase", *tokens: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(tokens))


def text_config(tokenizer: "PreTrainedTokenizerBase") -> dict[str, object]:
    """The token ids that every family's language model has in its configuration."""
    end_of_text, end_of_turn = token_ids(tokenizer, "<|endoftext|>", "<|im_end|>")
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_turn,
        "pad_token_id": end_of_text,
    }


def never_worth_saying(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Ids of what is not legible: added tokens, control characters, pieces of characters."""
    added = tokenizer.added_tokens_decoder
    return [
        token
        for token in range(len(tokenizer))
        if token in added
        or not (text := tokenizer.decode([token])).isascii()
        or not text.isprintable()
    ]
