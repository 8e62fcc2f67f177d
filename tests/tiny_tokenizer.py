"""A chat tokenizer on disk without a model: for runs of light roles, which import no torch. Nothing is downloaded."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' + "
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same with tools, and calls of them as Hermes and Qwen3 spell them."""
THINKING_TEMPLATE = (
    "{% set last = namespace(asked=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}{% set parts = message['content'].split('</think>') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.role != 'assistant' %}{{ message['content'] }}{% else %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{% if loop.index0 > last.asked and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}"
    "{% endif %}{{ parts[-1].lstrip('\n') }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same as Qwen3 has it: thinking is shown of the turns after the last question, and dropped from earlier ones."""
QWEN3_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% set last = namespace(asked=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% set parts = message.content.split('</think>') %}"
    "{% set thought = message.reasoning_content or (parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 "
    "else '') %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > last.asked and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}"
    "{% endif %}"
    "{% set content = parts[-1].lstrip('\n') %}{{ content }}"
    "{% for call in message.tool_calls or [] %}"
    "{% if content or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) "
    "+ '\n</tool_call>' }}{% endfor %}"
    "{% elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""The same with tools and calls of them, and the last turn says so where nothing was thought."""
VISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with images, as Qwen's models of text and images have it; needs VISION_TOKENS."""
SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GLM_TOKENS = [
    *(f"<|{name}|>" for name in ("begin_of_image", "end_of_image", "image")),
    *(f"<|{name}|>" for name in ("video", "begin_of_video", "end_of_video")),
]
"""The same of GLM's, by whose names its processor finds them."""
GLM_TEMPLATE = VISION_TEMPLATE.replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>"
)
EOS_TOKEN_ID = SPECIAL_TOKENS.index("<|im_end|>")


def write_tokenizer(
    path: Path, template: str = CHAT_TEMPLATE, more_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges (259 tokens, and `more_tokens` after SPECIAL_TOKENS), by default with the
    ChatML template, saved into `path`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *more_tokens, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", *more_tokens],
    )
    fast.chat_template = template
    fast.save_pretrained(path)
    return fast
