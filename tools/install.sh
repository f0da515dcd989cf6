#!/usr/bin/env bash
# install.sh VENV LOCK COMPLETE: make VENV hold exactly what LOCK says, and this package in editable form.
set -euo pipefail
venv=$1 lock=$2 complete=$3
python=${PYTHON:-python3}

wanted=$(sha256sum "$lock" pyproject.toml | sha256sum | cut -d' ' -f1)
if [ -f "$complete" ] && [ "$(cat "$complete")" = "$wanted" ] && "$venv/bin/python" -c 'import megarl' 2>/dev/null; then
    exit 0
fi

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "error: the lock file is for Python 3.11; $python is $("$python" --version 2>&1). Name one: make PYTHON=/path/to/python3.11" >&2
    exit 2
}
if [ -e "$venv" ] && [ ! -f "$complete" ]; then
    echo "== $venv: an earlier install did not end; starting over"
    rm -rf "$venv"
elif [ -e "$venv" ] && ! "$venv/bin/python" -c '' 2>/dev/null; then
    echo "== $venv: its Python does not run (was it moved?); starting over"
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    echo "== creating $venv"
    "$python" -m venv "$venv"
fi
rm -f "$complete"
total=$(grep -c '==' "$lock")
echo "== installing $total packages from $lock (2.9 GB; some minutes)"
# --no-deps: the lock is complete, and a resolver would add builds that break beside the CPU torch.
# --no-compile: modules are compiled when they are first imported, which most never are.
progress='
    /^(Collecting|Processing)/ { if (++n % 30 == 0) print "   fetched " n " of " total }
    /^Installing collected/    { print "   unpacking" }
    /^(ERROR|error)/           { print > "/dev/stderr" }
    { fflush() }'
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --no-deps --no-compile --disable-pip-version-check ${PIP_OPTIONS:-} -r "$lock" 2>&1 | awk -v total="$total" "$progress" || {
    echo "error: the install failed. If pip found no torch of that version with +cpu, add PyTorch's CPU wheel index: make PIP_OPTIONS='--extra-index-url ...'" >&2
    exit 2
}
"$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation --disable-pip-version-check -e .
echo "== checking that it imports"
"$venv/bin/python" -c 'import megarl.cli, ray, torch, transformers'
echo "$wanted" > "$complete"
