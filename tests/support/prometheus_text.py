"""What the exporter serves, read by prometheus-client's own parsers."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager

from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from stepscope.export.prometheus import ExporterCollector, open_server
from tests.support.server import running

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
Samples = dict[str, list[tuple[dict[str, str], float]]]  # Labels and value, by name.


def serving(collector: ExporterCollector) -> AbstractContextManager[str]:
    """Serve on a free port; yield the address without a path."""
    return running(open_server(collector, "127.0.0.1", 0))


def get(url: str, **headers: str) -> tuple[str, str]:
    """Return the content type and the text."""
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def scrape(url: str) -> Samples:
    """Read both formats, which must be of the same samples; a name without `stepscope_`."""
    kind, text = get(f"{url}/metrics")
    assert kind.startswith("text/plain; version=0.0.4")
    kind, opened = get(f"{url}/metrics", Accept=OPENMETRICS)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert opened.endswith("# EOF\n")
    found, other = _samples(text_families(text)), _samples(open_families(opened))
    assert repr(found) == repr(other)  # NaN is not equal to itself
    return found


def _samples(families: Iterator[object]) -> Samples:
    found: Samples = defaultdict(list)
    for family in families:
        for one in family.samples:  # type: ignore[attr-defined]
            labels = {name: value for name, value in one.labels.items() if value}
            assert (labels, one.value) not in found[one.name.removeprefix("stepscope_")]
            found[one.name.removeprefix("stepscope_")].append((labels, one.value))
    return found
