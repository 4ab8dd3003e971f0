#!/usr/bin/env bash
# Make a virtual environment with plait in it: setup.sh VENV PYTHON EXTRA
# torch comes first and alone, pinned; a constraint keeps every later install from choosing another.
set -euo pipefail
venv=$1 python=$2 extra=$3
torch_version=2.13.0

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet)

if ! "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$torch_version')" 2>/dev/null; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        echo "setup: torch $torch_version (CUDA build: a GPU is at hand)"
        "${pip[@]}" "torch==$torch_version" numpy
    else
        echo "setup: torch $torch_version (CPU build)"
        "${pip[@]}" "torch==$torch_version+cpu" numpy 2>/dev/null \
            || "${pip[@]}" "torch==$torch_version+cpu" numpy --extra-index-url https://download.pytorch.org/whl/cpu
    fi
fi

constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
"$venv/bin/python" -c "import torch; print('torch==' + torch.__version__)" >"$constraint"
echo "setup: plait[$extra]"
"${pip[@]}" --constraint "$constraint" --editable ".[$extra]"
