#!/usr/bin/env bash
# Make the environment of the peer, TRL 1.10, one of the last releases with a PPO trainer: setup_peer.sh [VENV] [PYTHON]
# It is one of its own because plait's tests need TRL 1.16. torch comes first and alone, pinned, in its CPU build; a
# constraint keeps the later install from choosing another.
set -euo pipefail
venv=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/plait/trl-1.10}
python=${2:-python3}
torch_version=2.13.0

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet)

if ! "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$torch_version')" 2>/dev/null; then
    echo "setup: torch $torch_version (CPU build)"
    "${pip[@]}" "torch==$torch_version+cpu" numpy 2>/dev/null \
        || "${pip[@]}" "torch==$torch_version+cpu" numpy --extra-index-url https://download.pytorch.org/whl/cpu
fi

constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
"$venv/bin/python" -c "import torch; print('torch==' + torch.__version__)" >"$constraint"
echo "setup: trl 1.10"
"${pip[@]}" --constraint "$constraint" "trl==1.10.*" transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0
TRL_EXPERIMENTAL_SILENCE=1 "$venv/bin/python" - <<'CHECK'
import importlib.metadata as metadata

from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: F401

print("setup: " + ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "trl", "transformers")))
CHECK
echo "setup: peer's Python is $venv/bin/python"
