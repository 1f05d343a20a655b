#!/bin/sh
# Changes one place at a time in the folders that tests/mutmut.cfg lists, and checks that a test fails:
# mutate.sh [PATTERN]
#
# PATTERN chooses mutants by name. The default takes every tenth; '*' takes all, which needs a night.
# Works in a copy in a new folder of /tmp, where `mutmut results` lists the survivors afterwards and
# `mutmut show NAME` their changes. Needs mutmut: .venv/bin/pip install mutmut==3.8.1
set -eu
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
copy=$(mktemp -d /tmp/stepscope-mutants-XXXX)
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy"
cd "$copy"
cp tests/mutmut.cfg setup.cfg
mkdir mutants  # Python remembers a folder of its path that is missing when it starts
echo "working in $copy"
OMP_NUM_THREADS=1 PYTHONPATH=$copy/mutants nice -n 19 "$bin/mutmut" run --max-children 1 "${1:-*7}"
