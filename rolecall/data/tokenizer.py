"""The tokenizer of a model directory: renders a conversation once, decodes for people. Imports no torch.

Owns what makes one tokenizer the same as another, by which roles are compared as they join
(services/controller/fleet/members.py). Needs a `tokenizer.json`: slow, Python-only tokenizers are refused in
words.
"""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rolecall.data.json_text import parse_json
from rolecall.data.model.files import require_model_folder
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import ModelSection

TOKENIZER_CONFIG = "tokenizer_config.json"
"""File of a tokenizer's configuration, in which a chat template may stand, too."""
TOKENIZER = "tokenizer.json"
"""File of a tokenizer."""
TEMPLATE = "chat_template.jinja"
"""File of a tokenizer's chat template."""
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
"""Files of a tokenizer's further chat templates, such as one for tools, which the library takes by their names."""
_PROBE = (
    "It 's 12,345.6 ; isn't ISN'T  it?\n\n\tdef f(x):\r\n  return x**2  # "
    "\u00e9 e\u0301 \ufb01 \u4f60\u597d \u0928\u093f \U0001f642 "
)
"""A text of what tokenizers differ in beside their vocabularies: splitting, normal forms, spaces, tidied decoding."""
_IDS = range(256, 1280)
"""Ids that stand for pieces of text in every vocabulary of a language model, beside added tokens: after the bytes that
some have first. They tell families apart, and are few.
"""


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template."""

    @classmethod
    def of(cls, model: ModelSection, *, renders: bool = True) -> "ChatTokenizer":
        """The tokenizer that a run renders its prompts by. ConfigError names what it lacks."""
        return cls(model.path, model.chat_template_kwargs, model.chat_template, renders=renders)

    def __init__(
        self,
        path: Path,
        template_kwargs: Mapping[str, Any] = {},
        template: Path | None = None,
        *,
        renders: bool = True,
    ) -> None:
        """Loads from the model directory `path`. `template_kwargs`: what the template is given besides conversations
        (model.chat_template_kwargs); `template`: the file of one that takes the place of all that the tokenizer has
        (model.chat_template); `renders`: whether conversations are rendered, which needs a template. ConfigError names
        what it lacks.
        """
        require_model_folder(path)
        if not (path / TOKENIZER).is_file():
            raise ConfigError(
                f"model.path {path} has no tokenizer.json; save the tokenizer with save_pretrained, as a fast tokenizer"
            )
        for name in (TOKENIZER, TOKENIZER_CONFIG):
            _check_json(path / name)
        # a second of imports, for those alone who load one
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        try:
            self.backend = TokenizersBackend.from_pretrained(str(path), local_files_only=True)
            """The library's own tokenizer."""
        except Exception as error:  # the entry point of a reader that answers odd files with errors of every kind
            raise ConfigError(
                f"model.path {path}: transformers cannot load its tokenizer ({type(error).__name__}: {error}); save it "
                "again with save_pretrained"
            ) from error
        own, self._template_name = read_template(template), "the chat template"
        self.replaces_template = own is not None and bool(self.backend.chat_template)
        """Whether the tokenizer has chat templates that a file took the place of."""
        if own is not None:
            self.backend.chat_template, self._template_name = own, f"the chat template {template}"
        if renders and not self.backend.chat_template:
            raise ConfigError(
                f"model.path {path}: the tokenizer has no chat template; name a file of one as model.chat_template, or "
                "set tokenizer.chat_template and save it"
            )
        self._template_kwargs = template_kwargs

    def twin(self) -> "ChatTokenizer":
        """The same for one more thread: only one may make tokens at a time."""
        return copy.deepcopy(self)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generate: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as the text that is tokenized, generation prompt included if `generate`, and the schemas of
        `tools` where the template shows them. InvalidInputError when the template refuses it.
        """
        try:
            return str(
                self.backend.apply_chat_template(
                    list(messages),
                    tools=None if tools is None else list(tools),
                    tokenize=False,
                    add_generation_prompt=generate,
                    **self._template_kwargs,
                )
            )
        except Exception as error:  # the entry point of a template, which is somebody's code
            roles = ", ".join(message["role"] for message in messages)
            raise InvalidInputError(
                f"{self._template_name} cannot render the turns {roles} ({error}); mend the conversation or the "
                "template"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; the template has put in every special token, so none is added."""
        ids = self.backend.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidInputError("the rendered prompt has no tokens; look at the chat template")
        return [int(token) for token in ids]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of text that somebody said, in which nothing is read as a special token."""
        ids = self.backend(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [int(token) for token in ids]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters of `text`, as [start, end), that each id of `encode_plain` stands for. Several ids of one
        character have the same.
        """
        read = self.backend(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        return [(int(start), int(end)) for start, end in read["offset_mapping"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens: for people and scorers."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=True))

    def spell(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens: for people who want to see them."""
        return str(self.backend.decode([int(token) for token in token_ids]))

    @cached_property
    def digest(self) -> str:
        """Hex digest of what it does: its vocabulary, what it makes of a probe and back, its templates and what they
        are given besides conversations. Not of its files, which the library writes anew in another form whenever a
        model is saved, and where a template has three places to stand.
        """
        ids = self.backend.encode(_PROBE, add_special_tokens=False)
        added = [
            (place, token.content, token.special, token.lstrip, token.rstrip, token.normalized, token.single_word)
            for place, token in self.backend.added_tokens_decoder.items()
        ]
        vocab, splits = sorted(self.backend.get_vocab().items()), self.backend.split_special_tokens
        return _digest([vocab, sorted(added), splits, ids, self.decode(ids), self._templates()])

    def _templates(self) -> list[Any]:
        """The templates by name, and what they are given besides conversations: of the special tokens those that one of
        them names, for a copy may have another that none reads, to pad with.
        """
        own = self.backend.chat_template or {}
        named = {"default": own} if isinstance(own, str) else own
        # as Jinja reads them, without one line end at the end
        texts = {name: text.removesuffix("\n") for name, text in named.items()}
        read = "".join(texts.values())
        special = {name: text for name, text in self.backend.special_tokens_map.items() if name in read}
        return [texts, special, self._template_kwargs]

    @cached_property
    def ids_digest(self) -> str:
        """Hex digest of what its ids stand for: the same for all tokenizers of a family, whatever tokens one of them
        adds and however each splits a text.
        """
        vocab = self.backend.backend_tokenizer.get_vocab(with_added_tokens=False)
        return _digest(sorted((place, piece) for piece, place in vocab.items() if place in _IDS))

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts that are read as special tokens wherever they stand."""
        return frozenset(token.content for token in self.backend.added_tokens_decoder.values() if token.special)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that merge with no neighbour, special or not."""
        return frozenset(self.backend.added_tokens_decoder)

    @cached_property
    def max_token_chars(self) -> int:
        """Most characters of a text that one token stands for."""
        return max(map(len, self.backend.get_vocab()))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id."""
        token_id = self.backend.eos_token_id
        return None if token_id is None else int(token_id)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included."""
        return len(self.backend)

    @property
    def num_ids(self) -> int:
        """One more than the greatest id it can make; with gaps among the ids more than `vocab_size`."""
        return max(self.backend.get_vocab().values(), default=-1) + 1


def read_ids_digest(path: Path) -> str:
    """The `ids_digest` of the tokenizer in the model directory `path`; empty where it has none. ConfigError."""
    return ChatTokenizer(path, renders=False).ids_digest if (path / TOKENIZER).is_file() else ""


def read_template(path: Path | None) -> str | None:
    """The text of the chat template that a run names (model.chat_template); None where it names none. ConfigError."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.chat_template: cannot read {path}: {error}; name a file of Jinja text") from error
    if not text.strip():
        raise ConfigError(f"model.chat_template: {path} is empty; name a file of Jinja text")
    return text


def has_chat_template(path: Path) -> bool:
    """Whether the tokenizer in the model directory `path` has a chat template, by its files alone. ConfigError for one
    that is no JSON.
    """
    config = path / TOKENIZER_CONFIG
    _check_json(config)
    return (path / TEMPLATE).is_file() or bool(config.is_file() and parse_json(config.read_text()).get("chat_template"))


def _digest(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _check_json(path: Path) -> None:
    """The library's own complaint about a broken file names neither file nor place."""
    if not path.is_file():
        return
    try:
        parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: cannot read {path}: {error}; save the tokenizer again with save_pretrained"
        ) from error
