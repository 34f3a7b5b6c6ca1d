"""Job scripts from templates: what is asked for appears, what is not leaves no line, and what cannot be is refused."""

import re
import subprocess
from pathlib import Path

import pytest

from hpcpar.cli.main import main
from hpcpar.launch.script import Request, ScriptError, clock, fill, seconds, write_script

pytestmark = pytest.mark.serial

HOME = Path(__file__).resolve().parents[2]
JOB = """
[mesh]
batch = -1
depth = 2
[model]
name = "unet3d"
[loss]
name = "cross_entropy"
[checkpoint]
every = 100
"""
TRAIN = ["hpcpar", "train", "jobs/unet3d-brain.toml", "--resume", "auto"]


def request(launcher="srun --wait=120", script="again.sh", command=TRAIN, **more):
    places = {"directory": Path("."), "output": Path("unet3d-brain"), "script": Path(script)}
    return Request(job=TRAIN[2], command=command, launcher=launcher, **places, **more)


ON_GPU = [*TRAIN, "--set", "run.device='gpu'"]
# The files of jobs/ are what the templates give for these; write_files below writes them anew.
FILES = {
    "slurm/one-node.sbatch": ("slurm", request(ranks_per_node=4, cores_per_rank=8)),
    "slurm/many-nodes.sbatch": ("slurm", request(nodes=4, ranks_per_node=8, cores_per_rank=4, seconds=8 * 3600)),
    "slurm/gpu-nodes.sbatch": (
        "slurm",
        request(nodes=2, ranks_per_node=4, cores_per_rank=8, gpus_per_node=4, command=ON_GPU),
    ),
    "slurm/mpirun.sbatch": ("slurm", request("mpirun -n 16", nodes=2, ranks_per_node=8)),
    "slurm/chain.sbatch": ("slurm", request(nodes=2, ranks_per_node=8, chain=8)),
    "pbs/many-nodes.pbs": (
        "pbs",
        request("mpiexec -n 32", "jobs/pbs/many-nodes.pbs", nodes=4, ranks_per_node=8),
    ),
    "flux/many-nodes.flux": (
        "flux",
        request("", "jobs/flux/many-nodes.flux", nodes=4, ranks_per_node=8),
    ),
}


def write_files():
    """Write the files of jobs/ anew, after a template has changed."""
    for name, (scheduler, asked) in FILES.items():
        path = HOME / "jobs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(write_script(asked, scheduler))


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_jobs_are_what_the_templates_give(name):
    scheduler, asked = FILES[name]
    assert (HOME / "jobs" / name).read_text() == write_script(asked, scheduler)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "flux"])
def test_scripts_are_good_shell_with_and_without_everything(scheduler, tmp_path):
    everything = request(
        nodes=2, ranks_per_node=4, cores_per_rank=2, gpus_per_node=4, partition="gpu", account="phys-1",
        options=["--one", "--two"], setup=["module load a", "module load 'b c'"],
    )  # fmt: skip
    for asked in (request(), everything):
        text = write_script(asked, scheduler)
        assert not re.search(r"@\w+@", text)
        path = tmp_path / "job.sh"
        path.write_text(text)
        run = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0 and run.stderr == ""
    for words in ("--one", "--two", "gpu", "phys-1", "\nmodule load a\nmodule load 'b c'\n"):
        assert words in text and words not in write_script(request(), scheduler)


def test_lines_of_options_that_are_not_given_are_left_out():
    text = "start\n--nodes=@nodes@ --time=@time@\n--account=@account@\n--also=@option@\n--x=@account@@nodes@\nend\n"
    values = {"nodes": 2, "time": "01:00:00", "account": None, "option": []}
    assert fill(text, values) == "start\n--nodes=2 --time=01:00:00\nend\n"
    values = {"nodes": 2, "time": "01:00:00", "account": "a@b", "option": ["p", "q"]}
    assert fill(text, values).splitlines()[2:] == ["--account=a@b", "--also=p", "--also=q", "--x=a@b2", "end"]


def test_what_only_looks_like_a_place_is_left_alone():
    text = 'for x in "${all[@]}"; do mail me@here "USR1@@margin@"; done\n'
    assert fill(text, {"margin": 60}) == 'for x in "${all[@]}"; do mail me@here "USR1@60"; done\n'


def test_a_template_that_names_what_there_is_not_says_where():
    with pytest.raises(ScriptError, match=r"centre.sh, line 2: nothing is called @node@; did you mean @nodes@\?"):
        fill("#!/bin/sh\n--nodes=@node@\n", {"nodes": 1}, "centre.sh")
    with pytest.raises(ScriptError, match="option and setup are lists"):
        fill("@option@ @setup@\n", {"option": [], "setup": []})


def test_pbs_asks_for_cores_threads_and_gpus_in_one_line():
    text = write_script(request(nodes=3, ranks_per_node=4, cores_per_rank=8, gpus_per_node=2), "pbs")
    assert "\n#PBS -l select=3:ncpus=32:mpiprocs=4:ompthreads=8:ngpus=2\n" in text


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 5400), ("90m", 5400), ("2h", 7200), ("1d", 86400), ("45s", 45), ("1:30:00", 5400), ("2-12:00:00", 216000)],
)
def test_times(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["1:30", "", "h", "-5", "1.5h", "2 h", "1:3:0"])
def test_times_that_are_none(text):
    with pytest.raises(ScriptError, match="is no time; right would be"):
        seconds(text)


def test_batch_systems_get_hours_beyond_a_day():
    assert clock(216000) == "60:00:00" and clock(61) == "00:01:01"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes: 0; at least 1"),
        ({"cores_per_rank": -1}, "cores per rank: -1"),
        ({"seconds": 300, "margin": 300}, "300 s before a limit of 300 s; no time is left"),
    ],
)
def test_requests_that_make_no_job(wrong, message):
    with pytest.raises(ScriptError, match=message):
        request(**wrong)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    return "job.toml"


def test_submit_shows_the_script_and_writes_nothing(job, capsys, tmp_path):
    words = ["--nodes", "2", "--ranks-per-node", "4", "--time", "2h", "--partition", "gpu", "--scheduler", "slurm"]
    assert main(["submit", job, *words, "--set", "run.dir='my run'", "--print"]) == 0
    text = capsys.readouterr().out
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --time=02:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --signal=B:USR1@300",
        f"#SBATCH --output='{tmp_path}/my run/slurm'.%j.log",
    ):
        assert line in text.splitlines()
    assert "-m hpcpar train job.toml --set 'run.dir='\"'\"'my run'\"'\"'' --resume auto &" in text
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks-per-node", "3"], "1 node(s) with 3 rank(s) each: 3 ranks cannot be divided by 2 of mesh batch=-1"),
        (["--nodes", "2", "--set", "mesh.batch=4"], "mesh batch=4 x depth=2 needs 8 ranks, there are 2"),
        (["--nodes", "2", "--time", "soon"], "--time: 'soon' is no time"),
        (["--nodes", "2", "--time", "5m"], "300 s before a limit of 300 s"),
        (["--nodes", "2", "--template", "none.sh"], "none.sh: no such file or directory"),
        (["--nodes", "2", "--scheduler", "pbs", "--chain", "3"], "--chain is an array of Slurm"),
        (["--nodes", "2", "--set", "mesh.deep=2"], "mesh axis deep splits nothing"),
    ],
    ids=["mesh", "mesh-overridden", "time", "no-time-left", "template", "chain", "axis"],
)
def test_submit_refuses_before_the_batch_system_sees_the_job(job, capsys, words, message):
    assert main(["submit", job, "--print", "--scheduler", "slurm", *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.out == ""


def test_a_centres_template_from_option_or_environment(job, capsys, monkeypatch):
    Path("centre.sh").write_text(
        "#!/bin/sh\n# @template@\n#BATCH @nodes@x@ranks_per_node@ @partition@\n#BATCH @ranks@\n"
    )
    monkeypatch.setenv("HPCPAR_TEMPLATE", "centre.sh")
    for words in ([], ["--template", "centre.sh"]):
        assert main(["submit", job, "--nodes", "2", "--print", *words]) == 0
        assert capsys.readouterr().out == "#!/bin/sh\n# centre.sh\n#BATCH 2\n"


def test_submit_without_a_batch_system_says_so(job, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", job, "--nodes", "2"]) == 2
    assert "no sbatch, qsub or flux here" in capsys.readouterr().err
    assert main(["submit", job, "--nodes", "2", "--scheduler", "pbs"]) == 2
    assert "qsub is not here" in capsys.readouterr().err
    assert Path("runs/run/submit.pbs.sh").stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["--gpus-per-node", "2"], "asked for, but the job runs on the CPU"),
        (["--gpus-per-node", "1", "--set", "run.device='gpu'"], "2 rank(s) per node for 1 GPU(s)"),
        (["--set", "run.device='gpu'"], "runs on GPUs, but none are asked for"),
        (["--gpus-per-node", "2", "--set", "run.device='gpu'"], ""),
        (["--set", "checkpoint.every=0"], "a node that fails takes with it all"),
    ],
)
def test_submit_warns_of_what_is_not_wrong_but_seldom_meant(job, capsys, words, warning):
    assert main(["submit", job, "--ranks-per-node", "2", "--print", *words]) == 0
    shown = capsys.readouterr().err
    assert warning in shown and ("warning" in shown) == bool(warning)


def test_the_page_for_centres_lists_what_a_template_may_name():
    table = (HOME / "docs" / "centres" / "README.md").read_text().split("| name | value |")[1]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, flags=re.M) for name in re.findall(r"`(\w+)`", row)}
    assert listed == {*request().values(), "template"}


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "flux"])
def test_the_templates_are_part_of_the_package(scheduler):
    from importlib import resources

    assert resources.files("hpcpar.launch").joinpath(f"templates/{scheduler}.sh").is_file()
    assert "hpcpar.launch = templates/*.sh" in (HOME / "setup.cfg").read_text()
