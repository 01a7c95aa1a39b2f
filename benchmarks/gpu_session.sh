#!/usr/bin/env bash
# Check and time i2cl on a GPU in at most 8 minutes; the results are JSON.
#
#   benchmarks/gpu_session.sh [-o gpu.json] [--model FOLDER] [--tiny]
#
# Needs this checkout and a Python with PyTorch and transformers; nothing is fetched. Random weights are made
# on the device. On a machine without network, put wheels of the other dependencies into a folder, and name it
# in WHEELS; where there is a network:
#
#   pip download --no-deps -d wheels pydantic pydantic-core typing-inspection platformdirs lazy-loader \
#     jaxtyping wadler-lindig fastapi starlette uvicorn httpx2 prometheus-client
#
# Variables: PYTHON (default: python3), WHEELS, LIMIT (seconds; default: 480).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
limit=${LIMIT:-480}
path="$here/../src:$here"
if [[ -n "${WHEELS:-}" ]]; then
  target=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$target" "$WHEELS"/*.whl
  path="$path:$target"
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec timeout "$limit" "$python" "$here/gpu.py" --limit $((limit - 60)) "$@"
