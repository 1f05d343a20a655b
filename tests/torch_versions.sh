#!/bin/sh
# Runs the tests of what concerns torch under another version of it: torch_versions.sh VERSION [PYTEST ARGUMENTS]
#
# The CUDA build of that version on the simulator (simulator/), in .venv-torch-VERSION: 530 to 890
# MB to download, 2 GB on disk. The page and the built-in training are left out: they run with the pinned
# version only.
set -eu
cd "$(dirname "$0")/.."
version=$1
shift
venv=.venv-torch-$version
CUDASIM_BUILD=$PWD/$venv/cudasim simulator/setup.sh "$venv" "$version"

# The pinned packages but torch and the page. The machine's pip settings may cap torch.
grep -v '^torch==' constraints.txt >"$venv/constraints.txt"
packages=$(sed -n '/^[a-z]/p' requirements.txt | grep -vE '^(torch|streamlit|plotly)==')
install() { PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT="" "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
install "pip>=25.1"
# shellcheck disable=SC2086 # a list of words
install -c "$venv/constraints.txt" "torch==$version" --group dev $packages
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps -e .

if [ $# -eq 0 ]; then
  set -- tests/unit/test_torch_names.py tests/unit/test_hooks_*.py tests/unit/test_scalars.py tests/unit/test_allocator.py \
    tests/unit/test_commands.py tests/integration/test_watch_*.py tests/integration/test_tracker.py \
    tests/integration/test_integrations_*.py tests/integration/test_cli.py \
    --deselect tests/unit/test_commands.py::test_a_checkpoint_that_the_disk_refuses_does_not_end_the_run \
    --deselect tests/integration/test_cli.py::test_ui_serves_the_runs_of_the_caller_until_sigterm \
    $(for part in frameworks hang model_states oom profile settings stragglers values watch; do
      echo "tests/gpu/test_${part}_gpu.py"
    done)
fi
exec "$venv/bin/python" -m pytest --require-gpu "$@"
