"""Names and values that are secrets, such as API keys, and are never recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
_NAME = re.compile(
    r"(?i:(?<![a-z])(?:key|pat|auth)|token|passw(?:or)?d|pass(?:phrase)?|pwd|secret|credential"
    r"|api-?k(?:ey)?|bearer|webhook)(s?)(?![a-z])"
)
# Passwords in URLs; prefixes of Hugging Face, OpenAI, GitHub, Slack, AWS, JSON Web Tokens and PEM.
_VALUE = re.compile(
    r"(?i:://[^/\s]*:[^/\s]*@|bearer\s|hooks\.)|-----BEGIN |(?<![\w-])"
    r"(?:(?:hf_|sk-|gh[pousr]_|xox[abp]-)[\w-]{16}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.)"
)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the arguments of a command with the values of secrets hidden.

    >>> without_secrets(["--api-key", "x", "--hf_token=x", "--max-tokens", "9"])
    ['--api-key', '(hidden)', '--hf_token=(hidden)', '--max-tokens', '9']
    """
    shown, option = list[str](), ""
    for word in words:
        name, has_value, value = word.partition("=")
        if has_value and is_secret(name, value):
            word = f"{name}={HIDDEN}"
        elif not word.startswith("--") and is_secret(option, word):
            word = HIDDEN
        elif word.startswith("-"):
            option = "" if has_value else word  # its values are all words up to the next option
        shown.append(word)
    return shown


def with_hidden_secrets(name: object, value: Any) -> Any:
    """Return a setting as recorded: texts that are secrets, at any depth, are hidden.

    >>> with_hidden_secrets("config", {"lr": 0.1, "login": {"hf_token": "x"}, "max_tokens": 9})
    {'lr': 0.1, 'login': {'hf_token': '(hidden)'}, 'max_tokens': 9}
    """
    if isinstance(value, Mapping):
        return {key: with_hidden_secrets(key, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [with_hidden_secrets(name, one) for one in value]
    return HIDDEN if isinstance(value, str) and is_secret(str(name), value) else value


def is_secret(name: str, value: Any) -> bool:
    """Return True for a name such as `api_key`; a number may be `max_tokens` or `key_size`.

    A text in brackets is a special token of a tokenizer: `pad_token="<pad>"`.
    """
    if isinstance(value, str) and re.fullmatch(r"<[^<>]*>|\[[^\[\]]*\]", value):
        return False
    number = not isinstance(value, str) or value.replace(".", "", 1).isdecimal()
    if isinstance(value, str) and _VALUE.search(value):
        return True
    return any(
        not number or (found.end() == len(name) and not found[1]) for found in _NAME.finditer(name)
    )
