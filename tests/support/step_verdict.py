"""The verdict on a window of steps alone."""

from __future__ import annotations

from stepscope.diagnosis.classify import verdicts
from stepscope.diagnosis.results import BottleneckDiagnosis, IsSettingAllowed, StepAverages
from stepscope.run_setup import RunSetup


def verdict(
    figures: StepAverages,
    setup: RunSetup,
    allowed: IsSettingAllowed = lambda name, value: True,
) -> BottleneckDiagnosis:
    """Return the most important diagnosis by a window of steps alone."""
    return verdicts(figures, setup, allowed=allowed)[0]
