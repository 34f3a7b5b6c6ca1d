#!/usr/bin/env bash
# From a fresh machine with Python 3.10 or newer to a trained 3D network, in a few minutes on 2 cores:
#
#   bash jobs/quickstart.sh [KEY=VALUE ...]
#
# 1. Sets up .venv in the checkout: hpcpar, NumPy, h5py, and MPI with its mpiexec from a wheel (MPICH).
# 2. Prepares the brain data in data/brain: a T1 image at 2 mm with four tissue labels.
# 3. Trains a 3D U-Net on 4 ranks, 2 samples at a time, each volume on two ranks: jobs/unet3d-brain.toml.
# 4. Prints the Dice scores of the test cells; curves and slices are in the run directory, runs/unet3d-brain.
#
# What is there already is not done again, but for the training. KEY=VALUE overrides keys of the configuration, for
# example run.steps=50 or mesh.depth=4.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=jobs/environment.sh
source jobs/environment.sh

ranks=4
run_dir=runs/unet3d-brain
overrides=(--set "run.dir=$run_dir")
for word in "$@"; do
    if [[ $word == run.dir=* ]]; then run_dir=${word#run.dir=}; fi
    overrides+=(--set "$word")
done

make_environment .venv mpich cpu brain plot
export PATH=$PWD/.venv/bin:$PATH
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 # one thread a rank: the ranks are the parallelism

say "preparing the brain data"
mpiexec -n "$ranks" hpcpar data brain --spacing 2 --out data/brain

say "training on $ranks ranks"
mpiexec -n "$ranks" hpcpar train jobs/unet3d-brain.toml "${overrides[@]}"

say "test Dice"
python - "$run_dir/result.json" <<'PYTHON'
import json, sys
from hpcpar.data.brain import LABELS

result = json.load(open(sys.argv[1]))
print(f"    mean of the tissues  {result['test_dice']:.3f}")
for number, name in enumerate(LABELS):
    if f"test_dice_{number}" in result:
        print(f"    {name:<20} {result[f'test_dice_{number}']:.3f}")
PYTHON
