"""Remove host names, user names, addresses and paths from recorded text."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.common.json_values import dict_of
from stepscope.run import RunInfo
from stepscope.run.folder import user_name
from stepscope.run.rank_status import ranks_of

_FILES = (
    "bin|c|cc|cfg|ckpt|cpp|csv|cu|h|ini|ipynb|json|jsonl|log|npy|npz|parquet|pickle|pkl|pt|pth|"
    r"pyc?|pyx|safetensors|sh|so(?:\.\d+)*|sqlite|toml|txt|yaml|yml"
)
_NAME = re.compile(rf"[^/\\]+\.(?:{_FILES})", re.IGNORECASE)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>]+", re.IGNORECASE)
_QUOTED = re.compile(r"""(["'])((?:~|[A-Za-z]:)?[/\\][^"'\n]*)\1""")
_ABSOLUTE = re.compile(r"(?<![\w.>\]])(?:~\w*|[A-Za-z]:)?[/\\][^\s\"'<>|,;:()\[\]{}=]+")
_RELATIVE = re.compile(rf"(?:[\w.~-]+[/\\])+([\w.-]+\.(?:{_FILES}))\b", re.IGNORECASE)
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*")
_DOMAIN = re.compile(
    r"\b(?:[a-z0-9-]+\.)+(?:cluster|com|corp|edu|gov|internal|lan|local|localdomain|net|org)\b",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"(?:(?:version|driver|cuda|cudnn|nccl|torch|nvidia-[\w-]+|==)[\s\"':=v]{0,4})?"
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)|[0-9a-f:]*:[0-9a-f:.]+(?![\w:]))",
    re.IGNORECASE,
)
MIN_NAME = 4  # characters: a shorter name is part of too many texts
_COMMON = re.compile(
    "admin|backward|batch|cuda|data|device|docker|example|forward|group|host|input|linux|localhost|"
    "machine|main|memory|model|node|optimizer|process|python|rank|root|runner|script|server|step|"
    "stepscope|test|torch|train|trainer|training|ubuntu|user|worker",
    re.IGNORECASE,
)
"""Frequent words, which are no personal names."""


@dataclass(frozen=True, slots=True)
class Scrubber:
    """Function that replaces names and places in a text by words in brackets.

    `paths` are folders that no pattern finds, with spaces or unusual characters. A path of a file
    becomes the file's name. Names in prose that the run did not record remain, and so do names of
    less than MIN_NAME characters and common words.
    """

    hosts: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()

    def __call__(self, text: str) -> str:
        text = _URL.sub("[url]", text)
        for path in sorted(self.paths, key=len, reverse=True):
            if len(path) > 1:
                text = re.sub(re.escape(path) + r"(?![\w-])", "/path", text)
        text = _QUOTED.sub(lambda found: f"{found[1]}{_file(found[2])}{found[1]}", text)
        text = _ABSOLUTE.sub(lambda found: _file(found[0]), text)
        text = _RELATIVE.sub(lambda found: found[1], text)
        text = _MAIL.sub("[address]", text)
        text = _words(text, self.hosts, "[host]", r"(?:\.[\w-]+)*")
        text = _words(text, self.users, "[user]")
        return _ADDRESS.sub(_address, _DOMAIN.sub("[host]", text))


def scrubber_of(runs: Sequence[RunInfo], jsons: Iterable[object] = ()) -> Scrubber:
    """Return the scrubber with the names that runs and objects of JSON have, and this machine's."""
    found, paths = [dict_of(json) for json in jsons], {str(Path.home())}
    for run in runs:
        found += [run.run_json, dict_of(run.run_json.get("environment"))]
        found += [rank.run_json for rank in ranks_of(run.folder)]
        script = dict_of(run.run_json.get("script"))
        paths |= {str(run.folder.parent), str(script.get("cwd") or "")}
        folder = os.path.dirname(str(script.get("path") or ""))
        paths |= {folder, os.path.normpath(folder)}
    hosts = {socket.gethostname(), *(str(one.get("host") or "") for one in found)}
    users = {user_name(), *(str(one.get("user") or "") for one in found)}
    hosts |= {host.split(".")[0] for host in hosts}
    return Scrubber(frozenset(hosts), frozenset(users), frozenset(p for p in paths if "/" in p))


def _file(path: str) -> str:
    name = re.split(r"[/\\]", path)[-1]
    return name if _NAME.fullmatch(name) else "[path]"


def _words(text: str, names: Iterable[str], replacement: str, ending: str = "") -> str:
    kept = (name for name in names if len(name) >= MIN_NAME and not _COMMON.fullmatch(name))
    known = "|".join(sorted(map(re.escape, kept), key=len, reverse=True))
    if not known:
        return text
    pattern = rf"(?<![A-Za-z0-9])(?:{known})(?![A-Za-z0-9]){ending}"
    return re.sub(pattern, replacement, text, flags=re.IGNORECASE)


def _address(found: re.Match[str]) -> str:
    kept = found[0].rstrip(".:")
    try:
        ipaddress.ip_address(kept)
    except ValueError:  # a version with its name, a time, or part of a C++ name
        return found[0]
    return f"[address]{found[0][len(kept) :]}"
