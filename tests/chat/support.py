"""A tokenizer with the control symbols of many families, templates in their forms, and conversations."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>"),
)
TEXTS = [
    "The assistant answers the user: system, tool, function, arguments, Be brief. What is a \u00e9t\u00e9?\n\n" * 20,
    '{"name": "look_up", "arguments": {"word": "\u00e9t\u00e9"}}\n<tool_call>\n</tool_call> user assistant\n' * 20,
]

TRL = next(Path(path, "chat_templates") for path in find_spec("trl").submodule_search_locations)  # type: ignore[union-attr]
"""TRL's templates; its import takes every worker of pytest seconds."""

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Newlines are pieces of their own, as in the tokenizers of Llama 3 and Qwen."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM2 = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
SMOLLM3 = """
{%- set thinks = enable_thinking is not defined or enable_thinking -%}
<|im_start|>system
## Metadata
Today Date: {{ strftime_now("%d %B %Y") }}
Reasoning Mode: {{ "/think" if thinks else "/no_think" }}
{% if messages[0].role == "system" %}{{ messages[0].content }}{% endif %}<|im_end|>
{% for m in messages %}
{% if m.role == "assistant" %}
{% generation %}
{{ "<|im_start|>assistant\n" + m.content.lstrip("\n") + "<|im_end|>\n" }}
{%- endgeneration %}
{% elif m.role != "system" %}
{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
MISTRAL = (
    "{{ bos_token }}{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first and rest|length < messages|length %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
WRITTEN = {"chatml": CHATML, "smollm2": SMOLLM2, "smollm3": SMOLLM3, "mistral": MISTRAL, "olmo2": OLMO2}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place <now>",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "A town"}}},
    },
}
SYSTEM = {"role": "system", "content": "Be brief & kind."}
ASK = {"role": "user", "content": " What is a \u00e9t\u00e9?\nTell  me \U0001f469\u200d\U0001f467 "}
ANSWER = {"role": "assistant", "content": "A place, \u4f60\u597d."}
AGAIN = {"role": "user", "content": "And <|im_stop|> a \u00e9t\u00e9?"}
LAST = {"role": "assistant", "content": "12\n34"}
REASONED = {"role": "assistant", "content": "It rains.", "reasoning_content": "Rain\n\nfalls"}
CALL = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "K\u00f6ln"}}}],
}
RESULT = {"role": "tool", "content": '{"rain": true}'}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([ASK, ANSWER], None),
    "system": ([SYSTEM, ASK, ANSWER], None),
    "three turns": ([ASK, ANSWER, AGAIN, LAST, ASK, ANSWER], None),
    "system, two turns": ([SYSTEM, ASK, ANSWER, AGAIN, LAST], None),
    "reasoning": ([ASK, REASONED], None),
    "reasoning earlier": ([ASK, REASONED, AGAIN, LAST], None),
    "tools": ([SYSTEM, ASK, CALL, RESULT, LAST], [TOOL]),
    "tools without system": ([ASK, CALL, RESULT, REASONED, AGAIN, LAST], [TOOL]),
}


def write_tokenizer(directory: Path, template: str | None = CHATML, kind: str = "qwen", **config: Any) -> Path:
    """Writes a byte-level tokenizer: with NFC (`qwen`), or whose tokens' offsets leave out spaces (`llama`)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    else:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)]),
            ]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        **({} if template is None else {"chat_template": template}),
        **config,
    }
    kept = {key: value for key, value in fields.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept))
    return directory
