"""The prompts that the demo sends: one a line, from the user's file or the one that ships with kvferry."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvferry.errors import ConfigurationError


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
