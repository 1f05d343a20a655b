"""A value of a configuration that cannot be used, with its reason and remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """A setting that cannot have its value, with the label that people see, if it has one.

    >>> print(ConfigIssue("batch_size", "must be 1 to 9, got 0", "Choose another value"))
    batch_size must be 1 to 9, got 0. Choose another value.
    """

    field: str
    reason: str
    remedy: str
    label: str = ""

    def __str__(self) -> str:
        between = " " if self.reason.startswith("must ") else ": "
        return f"{self.label or self.field}{between}{self.reason}. {self.remedy}."


class ConfigError(ValueError):
    """A value that no device could run, as a ConfigIssue in `problem`."""

    def __init__(self, problem: ConfigIssue) -> None:
        super().__init__(str(problem))
        self.problem = problem
