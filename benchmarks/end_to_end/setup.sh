#!/usr/bin/env bash
# An environment for TRL: its own packages on top of those of .venv, so that both trainers use the same torch, transformers and vLLM.
set -euo pipefail
cd "$(dirname "$0")/../.."
make --no-print-directory install
rm -rf .venv-trl
.venv/bin/python -m venv .venv-trl
site() { "$1/bin/python" -c 'import site; print(site.getsitepackages()[0])'; }
echo "import site; site.addsitedir('$(site .venv)')" > "$(site .venv-trl)/megarl.pth"
# shellcheck disable=SC2086
.venv-trl/bin/python -m pip install -qq --no-deps --disable-pip-version-check ${PIP_OPTIONS:-} -r benchmarks/end_to_end/trl.txt
.venv-trl/bin/python -c 'import trl; print("TRL", trl.__version__)'
