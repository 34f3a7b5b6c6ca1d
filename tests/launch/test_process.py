"""Rank and size from the environments that launchers really make, and processes that did not find each other."""

import pytest

from hpcpar.launch.process import Process, expand_counts, lost_ranks, this_process

pytestmark = pytest.mark.serial

HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3",
}  # fmt: skip
ALLOCATION = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = {
    **ALLOCATION, "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4", "SLURM_NODEID": "1", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}  # fmt: skip
PMI2_STEP = {**STEP, "PMI_RANK": "4", "PMI_SIZE": "5"}
STEP_OF_ONE = {**ALLOCATION, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
# mpiexec in an allocation starts its helpers on the nodes with srun, and ranks inherit that step's variables
HYDRA_IN_STEP = {**STEP_OF_ONE, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", **HYDRA}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, (0, 1, None, None)),
        (HYDRA, (3, 4, 1, 2)),
        (OPEN_MPI, (3, 4, 1, 2)),
        (ALLOCATION, (0, 1, None, None)),
        (STEP, (4, 5, 1, 2)),
        (PMI2_STEP, (4, 5, 1, 2)),
        (STEP_OF_ONE, (0, 1, 0, 1)),
        (HYDRA_IN_STEP, (3, 4, 1, 2)),
        (FLUX, (3, 4, None, None)),
        ({**STEP, "PMIX_RANK": "4"}, (4, 5, 1, 2)),
    ],
    ids=[
        "alone",
        "hydra",
        "open-mpi",
        "batch-script",
        "srun",
        "srun-pmi2",
        "srun-one-task",
        "hydra-under-slurm",
        "flux",
        "srun-pmix",
    ],
)
def test_the_innermost_launcher_says_who_this_is(env, place):
    found = this_process(env)
    assert (found.rank, found.size, found.node_rank, found.node_size) == place


@pytest.mark.parametrize(
    ("env", "variable"),
    [
        (HYDRA, "PMI_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (STEP, "SLURM_STEP_NUM_TASKS"),
        (PMI2_STEP, "PMI_SIZE"),
        ({**STEP, "PMIX_RANK": "4"}, "SLURM_STEP_NUM_TASKS"),
    ],
    ids=["hydra", "open-mpi", "srun", "srun-pmi2", "srun-pmix"],
)
def test_processes_that_mpi_takes_for_jobs_of_one_are_refused_with_advice(env, variable):
    said = lost_ranks(1, env)
    assert f"started {this_process(env).size} processes ({variable}), but MPI sees one" in said and "--mpi" in said
    assert lost_ranks(4, env) == ""


@pytest.mark.parametrize(
    "env",
    [{}, ALLOCATION, STEP_OF_ONE, {**HYDRA_IN_STEP, "PMI_RANK": "0", "PMI_SIZE": "1"}],
    ids=["alone", "shell-of-an-allocation", "step-of-one-task", "mpiexec-of-one-rank"],
)
def test_one_process_that_is_meant_to_be_one_is_not_refused(env):
    assert lost_ranks(1, env) == ""


def test_a_rank_without_a_size_is_still_no_first_rank():
    assert this_process({"PMIX_RANK": "2"}) == Process(2, 3)
    assert lost_ranks(1, {"PMIX_RANK": "2"}) == ""


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1(x3)", [1, 1, 1]), ("", []), ("4(2)", []), ("many", [])],
)
def test_slurms_short_form_of_counts(text, counts):
    assert expand_counts(text) == counts
