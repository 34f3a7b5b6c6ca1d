"""The configurations that come with the package load, and are what their names say."""

import subprocess
from pathlib import Path

import pytest

from hpcpar.plan.summary import summarize
from hpcpar.train.config import CosmoFlow, Swin3d, UNet3d, ViT3d, load_job

pytestmark = pytest.mark.serial

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.mark.parametrize("path", sorted(JOBS.rglob("*.toml")), ids=lambda p: p.stem)
def test_every_configuration_loads(path):
    job = load_job(path)
    assert job.run.dir == f"runs/{path.stem}"
    assert job.run.steps or job.run.epochs
    assert job.data.train and job.data.validation and job.data.test


@pytest.mark.parametrize("width", [128, 256, 512])
def test_cosmoflow_variants_differ_in_width_and_ranks_of_a_sample_only(width):
    job, small = load_job(JOBS / f"cosmoflow-{width}.toml"), load_job(JOBS / "cosmoflow-128.toml")
    assert job.model == CosmoFlow(width=width)
    assert job.data.train == f"data/cosmology-{width}/train"
    assert (job.optim, job.schedule, job.loss) == (small.optim, small.schedule, small.loss)
    # activations of a sample grow with the cube of the width (0.824 GiB at 128): no rank holds more than 4 GiB of one
    assert 0.824 * (width / 128) ** 3 / job.mesh["depth"] < 4


def test_the_brain_network_runs_on_four_ranks():
    job = load_job(JOBS / "unet3d-brain.toml")
    assert isinstance(job.model, UNet3d) and job.model.classes == 4
    assert job.mesh == {"batch": -1, "depth": 2}
    # cells of 16 x 40 x 40 voxels at 2 mm: the bottom level still has a plane for each of the two ranks of a sample
    assert 16 // 2**job.model.levels >= job.mesh["depth"]


@pytest.mark.parametrize(("name", "model"), [("vit-brain", ViT3d), ("swin-brain", Swin3d)])
def test_transformers_of_the_brain_differ_from_the_u_net_in_the_model_alone(name, model):
    job, unet = load_job(JOBS / f"{name}.toml"), load_job(JOBS / "unet3d-brain.toml")
    assert isinstance(job.model, model) and job.model.classes == unet.model.classes
    assert (job.data, job.loss, job.mesh) == (unet.data, unet.loss, unet.mesh)
    facts = summarize(job, ranks=4, shape=(16, 40, 40))
    assert sum(row["parameters"] for row in facts["layers"]) == facts["parameters"]
    first = next(row for row in facts["layers"] if row["operation"] == "conv")
    assert first["shard"][2] * job.mesh["depth"] == first["shape"][2] == 8, "half of the planes of tokens"


@pytest.mark.parametrize("path", sorted([*JOBS.rglob("*.sh"), *JOBS.rglob("*.sbatch")]), ids=lambda p: p.name)
def test_scripts_are_bash(path):
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
