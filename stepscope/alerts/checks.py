"""The tables `[rules.NAME]` of alerts.toml: changes of default rules, and own rules. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepscope.alerts.evaluator import FIELDS, FIELDS_OF_ENDINGS, is_of_devices
from stepscope.alerts.fields import Wrong, flag, got, level_of, number, only, table_of, text_of
from stepscope.alerts.rules import (
    DEFAULTS,
    ENDINGS,
    GPU_IDLE,
    MEMORY_FULL,
    Comparison,
    Rule,
)
from stepscope.metrics import BY_KEY

NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
RULES_LIMIT = 50
TEXT_LIMIT, METRIC_LIMIT = 300, 500
LONGEST_S = 86_400.0
_COMMON = ("enabled", "level", "text", "for_s", "clear_s")
_OWN = ("metric", "above", "below", "not_finite", "clear", *_COMMON)
_BY_DEFAULT: dict[str, tuple[str, ...]] = {
    MEMORY_FULL: ("above", "clear", "enabled", "level", "text", "clear_s"),
    GPU_IDLE: ("below", "clear", *_COMMON),
    **dict.fromkeys(ENDINGS, ("enabled", "level", "text")),
}
_NAMES = {rule.name: rule for rule in DEFAULTS}


def rule(name: str, given: Any) -> Rule:
    """Check `[rules.NAME]`: a change of a default, or a rule of the user's own."""
    where = f"rules.{name}"
    if not NAME.fullmatch(name):
        raise Wrong(
            "rules: a name must be small letters, digits, '_' and '-', at most 40, got "
            f"{got(name)}. Rename the rule."
        )
    table = table_of(where, given)
    default = _NAMES.get(name)
    if default is None:
        return _own_rule(name, table, where)
    only(where, table, _BY_DEFAULT.get(name, _COMMON))
    if default.comparison.value in table:
        threshold = number(where, default.comparison.value, table)
        is_above = default.comparison is Comparison.ABOVE
        clear = min(threshold, default.clear) if is_above else threshold
        default = replace(default, threshold=threshold, clear=clear)
    if default.name == MEMORY_FULL and not 0 < default.threshold < 100:
        raise Wrong(
            f"{where}.above: must be a share of the memory between 0 and 100 %, got "
            f"{default.threshold:g}. 95 is the default."
        )
    return _with_common(_with_clear(default, table, where), table, where)


def _own_rule(name: str, table: Mapping[str, Any], where: str) -> Rule:
    only(where, table, [name for name in _OWN if name != "clear" or "not_finite" not in table])
    metric = text_of(where, "metric", table, METRIC_LIMIT)
    kinds = [kind for kind in Comparison if kind.value in table]
    if len(kinds) != 1:
        raise Wrong(
            f"{where}: must have exactly one of above, below and not_finite, got "
            f"{', '.join(kinds) or 'none'}. Known rules without them: {', '.join(_NAMES)}."
        )
    kind = kinds[0]
    threshold = math.nan
    if kind is Comparison.NOT_FINITE:
        if table["not_finite"] is not True:
            raise Wrong(f"{where}.not_finite: must be true, got {got(table['not_finite'])}.")
    else:
        threshold = number(where, kind.value, table)
    found = Rule(
        name=name,
        metric=metric,
        comparison=kind,
        threshold=threshold,
        clear=threshold,
        text=_default_text(metric, kind),
    )
    found = _with_common(_with_clear(found, table, where), table, where)
    if "text" not in table and found.for_s > 0:
        found = replace(found, text=f"{found.text} for {{seconds}}")
    return found


def _default_text(metric: str, kind: Comparison) -> str:
    what = BY_KEY[metric].label if metric in BY_KEY else "{metric}"
    about = "{device}: " if is_of_devices(metric) else ""
    bound = "" if kind is Comparison.NOT_FINITE else f", {kind} {{threshold}}"
    return f"{about}{what} is {{value}}{bound}"


def _with_clear(found: Rule, table: Mapping[str, Any], where: str) -> Rule:
    if "clear" not in table:
        return found
    clear = number(where, "clear", table)
    sides = {Comparison.ABOVE: clear <= found.threshold, Comparison.BELOW: clear >= found.threshold}
    if not sides.get(found.comparison, False):
        side = "below" if found.comparison is Comparison.ABOVE else "above"
        raise Wrong(
            f"{where}.clear: must be {side} the threshold {found.threshold:g} or equal, got "
            f"{clear:g}. The alert is over once the value is back at 'clear'."
        )
    return replace(found, clear=clear)


def _with_common(found: Rule, table: Mapping[str, Any], where: str) -> Rule:
    changes: dict[str, Any] = {}
    for name in ("for_s", "clear_s"):
        if name in table:
            changes[name] = number(where, name, table, 0, LONGEST_S)
    if "enabled" in table:
        changes["enabled"] = flag(where, "enabled", table)
    if "level" in table:
        changes["level"] = level_of(where, table)
    if "text" in table:
        changes["text"] = text = text_of(where, "text", table, TEXT_LIMIT)
        known = FIELDS_OF_ENDINGS if found.name in ENDINGS else FIELDS
        unknown = set(re.findall(r"\{(\w*)\}", text)) - known
        if unknown:
            raise Wrong(
                f"{where}.text: may have in braces only {', '.join(sorted(known))}, got "
                f"{{{min(unknown)}}}. Write it without braces."
            )
    return replace(found, **changes)
