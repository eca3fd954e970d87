#!/usr/bin/env bash
# Runs the tests of devices on CUDA, and prints figures beside TensorPipe; called by `make test-gpu`.
#
# Needs an interpreter ($GPU_PYTHON) with PyTorch 2.11 or newer with CUDA, pytest, pytest-timeout, hypothesis and
# what farcall depends on; expecttest for PyTorch's own tests. Nothing is downloaded: farcall is installed beside
# it, in a folder of its own, so that its entry points are found. The whole takes about 8 minutes on one GPU.
set -u
python=${GPU_PYTHON:-python3}
seconds=${GPU_SECONDS:-150}
parts=" ${GPU_PARTS:-figures devices conformance} " # what is run; each part takes $seconds at most, the last twice that
"$python" - <<'CHECK' || exit 2
import sys
try:
    import torch
except ImportError:
    sys.exit(f"{sys.executable} has no PyTorch: name an interpreter that has, as in make test-gpu GPU_PYTHON=...")
if not torch.cuda.is_available():
    sys.exit(f"PyTorch {torch.__version__} of {sys.executable} finds no CUDA device: nothing was tested")
CHECK
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --target "$site" . || exit 2
# The packages come from this tree; the folder only has farcall's entry points.
find "$site" -mindepth 1 -maxdepth 1 ! -name 'farcall-*.dist-info' -exec rm -rf {} +
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
export FARCALL_TEST_DEVICE=cuda PYTHONUNBUFFERED=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
FARCALL_TEST_DEVICES=$("$python" -c 'import torch; print(torch.cuda.device_count())')
export FARCALL_TEST_DEVICES
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name())' || exit 2
status=0
pytest=("$python" -m pytest -q -o addopts= -p no:cacheprovider)
if [[ $parts == *" figures "* ]]; then
  echo "== figures: farcall beside TensorPipe"
  timeout "$seconds" "$python" -m benchmarks.devices || status=1
fi
if [[ $parts == *" devices "* ]]; then
  echo "== the tests of devices, on CUDA: calls, collectives staged through the host, SPMD mode"
  timeout "$seconds" "${pytest[@]}" -m "not nightly" tests/group/devices || status=1
fi
if [[ $parts == *" conformance "* ]]; then
  echo "== PyTorch's tests of RPC with GPUs"
  timeout "$((2 * seconds))" "${pytest[@]}" tests/conformance/gpu.py || status=1
fi
exit $status
