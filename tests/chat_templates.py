"""Chat templates that behave like those of the target families, and tokenizers to go with them. Not a test."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Default system turn, tools, tool calls; <|im_end|> and a newline after each turn
QWEN25 = """
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0]['content'] if messages[0]['role'] == 'system' else 'You are helpful.') + '\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
  or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Thinking is kept after the last user turn only; an empty block without any; enable_thinking
QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}
{%- set content = m.content %}{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Headers, trimmed contents, today's date
LLAMA3 = """
{{- bos_token }}
{%- if not date is defined %}{%- set date = strftime_now("%d %b %Y") %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] | trim }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# No system turn, strict alternation, assistant is called model
GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# No generation prompt; a space before and the end of text after an answer
MISTRAL = """
{{- bos_token }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] | trim + eos_token }}
{%- else %}{{- raise_exception('Only user and assistant roles') }}{%- endif %}
{%- endfor %}
"""

# Channels; the last answer ends with <|return|>, earlier ones with <|end|> and without their analysis
GPT_OSS = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and loop.last %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# The generation prompt opens the thinking; what is rendered never shows it
DEEPSEEK = """
{{- bos_token }}
{%- for m in messages %}
{%- if m['role'] == 'system' %}{{- m['content'] }}
{%- elif m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}
{%- else %}
{%- set content = m['content'].split('</think>')[-1] if '</think>' in m['content'] else m['content'] %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
"""

# <|end|> after each turn, an end of text after the whole conversation
PHI = """
{%- for m in messages %}{{- '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

_GENERATION = """
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}{{- '<|im_start|>assistant\\n' }}{% generation %}{{- m['content'] }}INSIDE{% endgeneration %}OUTSIDE
{%- else %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
GENERATION = _GENERATION.replace("INSIDE", "{{- '<|im_end|>' }}").replace("OUTSIDE", "{{- '\\n' }}")
GENERATION_WITHOUT_END = _GENERATION.replace("INSIDE", "").replace("OUTSIDE", "{{- '<|im_end|>\\n' }}")

# Ignores add_generation_prompt, so the header of the answer is not part of any prompt
NO_GENERATION_PROMPT = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"

# No control tokens at all
PLAIN = """
{%- for m in messages %}{{- m['role'] + ': ' + m['content'] + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}
"""

PROMPT_ONLY = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
EVERYTHING = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
SYNTAX_ERROR = "{% for m in messages %}{{ m['content'] }"
ALWAYS_RAISES = "{{ raise_exception('this template is for embeddings') }}"

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<s>",
    "</s>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def make_byte_level(texts: Iterable[str]) -> Any:
    """A byte-level BPE tokenizer (GPT-2, Qwen, Llama-3 kind) with the control tokens of every template here."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in NOT_SPECIAL])
    return tokenizer


def make_metaspace(texts: Iterable[str]) -> Any:
    """A SentencePiece-like tokenizer (Mistral, Llama-2 kind): a space is put before the first word of a text only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", *SPECIAL, *[f"<0x{i:02X}>" for i in range(256)]], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Any, template: str, **special: str) -> Path:
    """Write a tokenizer folder with a template, as transformers does."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder
