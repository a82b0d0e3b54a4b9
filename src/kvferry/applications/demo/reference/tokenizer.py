"""Text to token ids and back: UTF-8 bytes for seeded models, a checkpoint's own tokenizer for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from kvferry.errors import ConfigurationError, ModelError

START_TOKEN = 256
END_TOKEN = 257
NUM_BYTE_TOKENS = 260
"""Ids of the byte-level vocabulary: 256 bytes, then start, end, padding and unknown."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """The UTF-8 bytes of the text as ids, after one start token."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of the text."""
        return [START_TOKEN, *text.encode("utf-8")]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ids without special ones; bytes that are no UTF-8, as random models write, become U+FFFD."""
        return bytes(token for token in token_ids if token < START_TOKEN).decode("utf-8", errors="replace")


class CheckpointTokenizer:
    """The tokenizer in a checkpoint's directory.

    Raises:
        ModelError: if the directory holds no tokenizer, or one that cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError(
                f"model directory {directory} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); "
                "copy the checkpoint's tokenizer files into it"
            )
        self._directory = directory
        self._tokenizer: Any
        try:
            # tokenizer.json says all there is to say. transformers goes by the model type first, and for some of
            # them reads any vocabulary as that family's own, without a word.
            if (directory / "tokenizer.json").is_file():
                from transformers import PreTrainedTokenizerFast

                self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
            else:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # any type, by the file that is broken
            raise ModelError(
                f"cannot load the tokenizer in {directory} ({type(error).__name__}: {error}); "
                "restore its files from the checkpoint"
            ) from error

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, special tokens that the model expects around it included.

        Raises:
            ModelError: if nothing is left of the text, which shows a tokenizer that is not the model's.
        """
        token_ids = [int(token) for token in self._tokenizer(text)["input_ids"]]
        if not token_ids:
            raise ModelError(f"the tokenizer in {self._directory} gives no tokens for {text[:40]!r}")
        return token_ids

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


Tokenizer: TypeAlias = ByteTokenizer | CheckpointTokenizer
"""Turns text into token ids and back."""


def load_tokenizer(model_directory: Path | None) -> Tokenizer:
    """The tokenizer of the checkpoint in `model_directory`; the byte-level one if that is None.

    Raises:
        ModelError: if the directory holds no tokenizer, or one that cannot be read.
    """
    return ByteTokenizer() if model_directory is None else CheckpointTokenizer(model_directory)


def read_prompts(path: Path | None = None) -> list[str]:
    """The prompts in `path`, one a line, without blank lines; kvferry's own if `path` is None.

    Raises:
        ConfigurationError: if the file is missing, is no UTF-8 text, or holds no prompt; names the path.
    """
    name = path or "prompts.txt"
    try:
        if path is None:
            text = files(__package__).joinpath("prompts.txt").read_text(encoding="utf-8")
        else:
            text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read prompts from {name} ({error}); give a UTF-8 text file with one prompt a line"
        ) from error
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigurationError(f"{name} holds no prompt; write one a line")
    return prompts
