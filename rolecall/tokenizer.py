"""The tokenizer of a model directory: renders a conversation once, decodes for people. Imports no torch.

Owns which files make a tokenizer and its digest. Needs a `tokenizer.json`: slow, Python-only tokenizers are refused in words.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from transformers.tokenization_utils_tokenizers import TokenizersBackend

from rolecall.errors import ConfigError, InvalidInputError

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template."""

    def __init__(self, path: Path) -> None:
        """Loads from the model directory `path`. ConfigError names what it lacks."""
        if not (path / "tokenizer.json").is_file():
            raise ConfigError(f"model.path {path} has no tokenizer.json; save the tokenizer with save_pretrained, as a fast tokenizer")
        self._tokenizer = TokenizersBackend.from_pretrained(str(path), local_files_only=True)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"model.path {path}: the tokenizer has no chat template; set tokenizer.chat_template and save it")
        files = [path / name for name in _FILES if (path / name).is_file()]
        self.digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
        """Hex digest of the tokenizer and its template."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as the text that is tokenized, generation prompt included."""
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; the template has put in every special token, so none is added."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidInputError("the rendered prompt has no tokens; look at the chat template")
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens: for people and scorers."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id."""
        token_id = self._tokenizer.eos_token_id
        return None if token_id is None else int(token_id)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included."""
        return len(self._tokenizer)
