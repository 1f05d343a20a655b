"""A value of a configuration that cannot be used, with its reason and remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """A setting that cannot have its value: field, reason and remedy."""

    field: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}. {self.remedy}."


class ConfigError(ValueError):
    """A value that no device could run, as a ConfigIssue in `problem`."""

    def __init__(self, problem: ConfigIssue) -> None:
        super().__init__(str(problem))
        self.problem = problem
