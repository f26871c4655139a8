#!/usr/bin/env bash
# Everything that a machine with a GPU can show and CI cannot: tests/gpu, then the quickstart with engine and training
# on the GPU, once in float32 and once in bf16-mixed. Installs nothing; about three minutes.
#
#     bash benchmarks/gpu.sh [FOLDER]      # logs and metrics go to FOLDER, ./gpu_out by default
#
# Needs Python >= 3.11 with torch for CUDA, lightning, transformers, jsonargparse, sortedcontainers, pytest,
# pytest-timeout and pytest-xdist. NCCL between processes and vLLM are not in it: they need more GPUs, and a vLLM for CUDA.
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu_out}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0

python3 -c "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
# other versions than the project's lock file may warn of other things
python3 -m pytest tests/gpu -q -W default -p no:cacheprovider 2>&1 | tee "$out/tests.log"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed=1

for precision in 32-true bf16-mixed; do
    echo "quickstart on the GPU, $precision"
    python3 -m lightning_ppo.cli fit --config configs/quickstart.yaml --trainer.accelerator gpu --trainer.devices 1 \
        --trainer.precision "$precision" --data.local.device cuda:0 --trainer.max_epochs 40 \
        --trainer.default_root_dir "$out/$precision" 2>&1 | tee "$out/quickstart-$precision.log" | tail -n 3
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
done
nvidia-smi --query-gpu=name,memory.used --format=csv,noheader || true
exit $failed
