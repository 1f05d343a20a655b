"""The plan of a sweep over a script of the user: its command, and variants of it.

A variant adds arguments (`bs64: --batch-size 64`), settings that need no edit
(`tf32 num_workers=4`), environment variables (`env:NAME=VALUE`) or the revision (`rev:main`).
Without a name its text is its name, and may have several parts.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from stepscope.common.config_issue import ConfigIssue
from stepscope.common.secrets import without_secrets
from stepscope.lab.command import UsageError
from stepscope.lab.folder import Trial
from stepscope.lab.plan import SweepPlan, Variant
from stepscope.lab.revision import RevisionError, resolve
from stepscope.lab.sweep_state import seconds_needed
from stepscope.run.rank_info import RANKS_LIMIT
from stepscope.settings import SETTINGS, SettingError, parse

ARGUMENTS = "arguments"
REV = "rev"
ENV = "env:"
WITH = "with:"
OUT = "{out}"  # In arguments: a folder of the trial.
SEED = "{seed}"  # In arguments: a number that all trials of a round share.
_NAMED = re.compile(r"([\w.+-]+):(?:\s+|$)(.*)", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z_]")  # not a negative number
_MAX_NAME = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptCommand:
    """A script or module with its arguments, in the folder where the sweep was started.

    `sha256` is that of the script's file, None for a module. `links` are paths of the repository,
    relative to its top folder, that other revisions share. `nproc_per_node` is torchrun's option,
    None without torchrun.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    cwd: str
    python: str
    sha256: str | None
    links: tuple[str, ...] = ()
    nproc_per_node: int | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders in which no trial may change a file: the current and the script's."""
        cwd, own = Path(self.cwd).resolve(), Path(self.cwd, self.target).resolve().parent
        return (cwd,) if self.is_module or own.is_relative_to(cwd) else (cwd, own)


@dataclass(frozen=True, kw_only=True)
class ScriptPlan(SweepPlan):
    """A sweep over a script. Raises ConfigError."""

    script: ScriptCommand

    @property
    def workload(self) -> str:
        return self.script.target if self.script.is_module else Path(self.script.target).stem

    @property
    def label(self) -> str:
        """The beginning of the baseline's command, for a column of a table."""
        module = ["-m"] if self.script.is_module else []
        words = [*module, self.script.target, *without_secrets(self.script.arguments)]
        ranks = self.script.nproc_per_node
        text = f"{'' if ranks is None else f'{ranks} ranks: '}{shlex.join(words)}"
        return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…"

    def subject(self) -> dict[str, Any]:
        return {"script": asdict(self.script)}

    def combine(
        self, first: Mapping[str, Any], second: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str | None]:
        before, added = first.get(ARGUMENTS, []), second.get(ARGUMENTS, [])
        rest = {name: value for name, value in second.items() if name != ARGUMENTS}
        together, refused = SweepPlan.combine(self, first, rest)
        twice = {*map(_name, before)} & {*map(_name, added)} - {""}
        if twice:
            refused = f"{min(twice)} is in the combination already"
        if added:
            together[ARGUMENTS] = [*before, *added]
        return together, refused


COMPILE_S = 40.0  # Assumed duration of the first torch.compile.
SLOWER_TRIALS = 1.25  # Allowance for trials that take longer than the first one.
TUNE_LOOKS = (3, 5, 8, 12)  # The first one is early, because the confirmation has fresh rounds.


@dataclass(frozen=True, kw_only=True)
class TunePlan(ScriptPlan):
    """A sweep of `stepscope tune` over all settings, within a time budget. Raises ConfigError."""

    minutes: float
    looks: tuple[int, ...] = TUNE_LOOKS

    @property
    def budget_s(self) -> float:
        return 60 * self.minutes

    def subject(self) -> dict[str, Any]:
        return {**ScriptPlan.subject(self), "minutes": self.minutes}

    @property
    def probe(self) -> list[str]:
        """The settings of all variants, each name once."""
        words = chain.from_iterable(words_of(variant.changes) for variant in self.variants)
        return list({word.partition("=")[0]: word for word in words}.values())

    def after_probe(self, trial: Trial) -> TunePlan:
        """Return the plan without refused settings, and those for which the time is too short.

        The last ones are left out first. The first one is measured even if it takes more time.
        """
        refused = {one.word: one.text for one in trial.settings if one.state != "applies"}
        plan = self._without(
            {variant.name: _refusal(variant, refused) for variant in self.variants}
        )
        text = f"Left out, to fit in {self.minutes:g} minutes."
        while len(plan.runnable) > 1 and plan._needed_s(trial) > self.budget_s:
            name = plan.runnable[-1].name
            plan = plan._without({name: ConfigIssue(name, text, "")})
        needed_s = plan._needed_s(trial)
        if needed_s <= self.budget_s:
            return plan
        return replace(plan, minutes=math.ceil(SLOWER_TRIALS * needed_s / 6) / 10)

    def _needed_s(self, first: Trial) -> float:
        compiled = sum(WITH + "compile" in variant.changes for variant in self.runnable)
        return seconds_needed(self, first) + COMPILE_S * compiled

    def _without(self, problems: Mapping[str, ConfigIssue | None]) -> TunePlan:
        variants = (
            replace(variant, problem=variant.problem or problems.get(variant.name))
            for variant in self.variants
        )
        return replace(self, variants=tuple(variants))


def _refusal(variant: Variant, refused: Mapping[str, str]) -> ConfigIssue | None:
    """Return why a setting of a variant, which may need the variant's own workers, is refused."""
    has_workers = f"{WITH}num_workers" in variant.changes
    for word in words_of(variant.changes):
        needs_workers = getattr(SETTINGS[word.partition("=")[0]], "needs_workers", False)
        if word in refused and not (has_workers and needs_workers):
            return ConfigIssue(word, refused[word], "")
    return None


def tuning_candidates(cores: int) -> list[str]:
    """Return the variants of `stepscope tune`; in a short time the last are left out first."""
    workers = f"num_workers={max(1, min(4, cores))}"
    return [
        *("tf32", "bf16", workers, "fused", "channels_last", "cudnn_benchmark"),
        *(f"{workers} pin_memory", f"{workers} persistent_workers"),
        f"{workers} pin_memory non_blocking",
        *("pin_memory", "persistent_workers", "prefetch_factor=4"),
        *((f"threads={cores // 2}",) if cores > 1 else ()),
        "compile",
    ]


def script_command(
    target: str,
    arguments: Sequence[str],
    *,
    is_module: bool,
    links: Sequence[str] = (),
    cwd: Path = Path(),
    nproc_per_node: int | None = None,
) -> ScriptCommand:
    """Return the command of a script that runs in the folder `cwd`. Raises UsageError."""
    if nproc_per_node is not None and not 1 <= nproc_per_node <= RANKS_LIMIT:
        raise UsageError(
            f"--nproc-per-node: must be 1 to {RANKS_LIMIT}, got {nproc_per_node}. Give the number "
            "of processes, usually that of the GPUs."
        )
    return ScriptCommand(
        target=target,
        is_module=is_module,
        arguments=tuple(arguments),
        cwd=str(cwd.absolute()),
        python=sys.executable,
        sha256=None if is_module else sha256_of(cwd / target),
        links=tuple(links),
        nproc_per_node=nproc_per_node,
    )


def sha256_of(script: Path) -> str:
    """Return the hash of a script's file. Raises UsageError if it cannot be read."""
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(
            f"script: {str(script)[:200]} cannot be read ({error.strerror}). Name a file that "
            "exists, or a module after -m."
        ) from error


def parse_variant(text: str, cwd: Path = Path()) -> Variant:
    """Return the variant of the text of `--variant` in the folder `cwd`. Raises UsageError."""
    named = _NAMED.fullmatch(text.strip())
    try:
        words = shlex.split(named[2] if named else text)
    except ValueError as error:
        raise UsageError(f"--variant: {text[:80]!r} cannot be split ({error}).") from error
    if not words:
        raise UsageError(f"--variant: {text[:80]!r} changes nothing. Give arguments after a name.")
    if named:
        return Variant(
            name=named[1][:_MAX_NAME],
            label=shlex.join(without_secrets(words)),
            changes={ARGUMENTS: words},
        )
    changes: dict[str, Any] = {}
    for word in words:
        name, value = _change(word, cwd)
        if name in changes:
            raise UsageError(f"--variant: {name} is given twice in {text[:80]!r}. Remove one.")
        changes[name] = value
    try:
        parse(words_of(changes))
    except SettingError as error:
        raise UsageError(f"--variant: {error}") from error
    name = " ".join(words)
    return Variant(name=name, label=" ".join(without_secrets(words)), changes=changes)


def _change(word: str, cwd: Path) -> tuple[str, Any]:
    """Return key and value of one part of a variant. Raises UsageError."""
    kind, _, rest = word.partition(":")
    if kind == REV and rest:
        try:
            return REV, resolve(rest, cwd)
        except RevisionError as error:
            raise UsageError(f"--variant: {error}") from error
    name, equals, value = rest.partition("=")
    if kind == "env" and equals and re.fullmatch(r"[A-Za-z_]\w*", name):
        return ENV + name, value
    if rest:
        raise UsageError(
            "--variant: must be 'NAME: ARGUMENTS', env:NAME=VALUE, rev:REVISION or settings, got "
            f"{word[:80]!r}."
        )
    name, equals, value = word.partition("=")
    return WITH + name, value if equals else True


def words_of(changes: Mapping[str, Any]) -> list[str]:
    """Return the settings of a variant as words of `stepscope watch --with`."""
    return [
        name.removeprefix(WITH) if value is True else f"{name.removeprefix(WITH)}={value}"
        for name, value in changes.items()
        if name.startswith(WITH)
    ]


def _name(word: str) -> str:
    """Return the name of `--name`, `--name=value` or `name=value`, otherwise ""."""
    return word.partition("=")[0] if _OPTION.match(word) or "=" in word else ""
