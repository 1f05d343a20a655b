"""Hide what looks like a secret, such as an API key, by its name or the form of its value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
_GIVEN = "access|api|auth|client|encryption|personal|private|secret|service|signing|ssh"
_ALWAYS = re.compile(r"passw(?:or)?ds?(?:_|$)|(?:^|_)(?:passphrase|passcode|pwd)(?:_|$)")
"""Names, in snake case, of which also a number is a secret."""
_NAME = re.compile(
    rf"secrets?(?:_|$)|(?:^|_)(?:credentials?|bearer|webhook|authorization|cookies?)(?:_|$)"
    rf"|(?:^|_)(?:pass|pat|auth)$|token$|^(?:key|token)s?$|(?:{_GIVEN})_?(?:k(?:ey)?|token)s?(?:_|$)"
)
"""Names whose values are secrets; `key` and `tokens` only after a word such as `api`."""
_NUMBER = re.compile(r"(?i)[-+.\de_]+[kmb]?|true|false|none|null|auto|yes|no|on|off|")
# Credentials in URLs; prefixes of Hugging Face, OpenAI, GitHub, GitLab, Slack, npm, AWS, Google,
# JSON Web Tokens and PEM.
_VALUE = re.compile(
    r"(?i:://[^/\s:@]{0,256}:[^/\s@]{0,256}@|://[\w-]{20,256}@|bearer\s|hooks\.)|-----BEGIN "
    r"|(?<![\w-])(?:(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|npm_|AIza)[\w-]{16}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.)"
)
_RANDOM = re.compile(r"(?=[^\d]*\d)(?=[^a-z]*[a-z])[\w-]{20,}", re.IGNORECASE)
_PAIR = re.compile(
    r"(?<![\w.-])([\w.-]{1,64})[\"']?\s{0,4}[:=]\s{0,4}[\"']?([^\s\"',;&?={}[\]]{1,256})"
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
    """Return a setting as recorded: secrets, at any depth, are hidden.

    >>> with_hidden_secrets("config", {"lr": 0.1, "login": {"hf_token": "x"}, "max_tokens": 9})
    {'lr': 0.1, 'login': {'hf_token': '(hidden)'}, 'max_tokens': 9}
    """
    if isinstance(value, Mapping):
        # Each value below a name such as `passwords` is a secret.
        names = {key: name if is_secret(str(name), "x") else key for key in value}
        return {key: with_hidden_secrets(names[key], one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [with_hidden_secrets(name, one) for one in value]
    return HIDDEN if is_secret(str(name), value) else value


def is_secret(name: str, value: Any) -> bool:
    """Return True for what looks like a secret by its name or the form of its value.

    A number may be `max_tokens`, a text in brackets is a special token: `pad_token="<pad>"`.

    >>> is_secret("apiKey", "x"), is_secret("image_key", "x"), is_secret("url", "u:/?token=x")
    (True, False, True)
    """
    text = str(value) if isinstance(value, str | int | float) else ""
    if re.fullmatch(r"<[^<>]*>|\[[^\[\]]*\]", text):
        return False
    return (
        _VALUE.search(text) is not None
        or _is_of_secret(name, text)
        or any(_is_of_secret(*found.groups()) for found in _PAIR.finditer(text))
    )


def _is_of_secret(name: str, text: str) -> bool:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower().strip("_")
    if _NUMBER.fullmatch(text):
        return text[:1].isdecimal() and _ALWAYS.search(name) is not None
    named = _ALWAYS.search(name) or _NAME.search(name)
    return named is not None or (name.endswith("_key") and _RANDOM.fullmatch(text) is not None)
