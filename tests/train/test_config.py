"""The configuration of a run: defaults, overrides, the way back to TOML, and one clear line for each mistake."""

import dataclasses

import pytest

from hpcpar.plan.virtual import VirtualMesh
from hpcpar.train import toml
from hpcpar.train.config import Adam, Cosine, CosmoFlow, UNet3d, dump_job, load_job, make_job
from hpcpar.train.tasks import make_task
from hpcpar.train.typed import ConfigError

pytestmark = pytest.mark.serial

SMALL = """
[model]
name = "unet3d"
classes = 4

[loss]
name = "cross_entropy"
"""


@pytest.fixture
def job_file(tmp_path):
    def write(text=SMALL):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return path

    return write


def mistakes(path, *overrides):
    with pytest.raises(ConfigError) as raised:
        load_job(path, overrides)
    return str(raised.value).split("\n")


def test_what_is_not_given_has_its_default(job_file):
    job = load_job(job_file())
    assert job.model == UNet3d(classes=4)
    assert job.mesh == {"batch": -1} and job.run.dtype == "float32" and job.schedule.name == "constant"


def test_the_name_chooses_the_variant(job_file):
    job = load_job(
        job_file(), ["optim.name=adam", "optim.betas=[0.8, 0.9]", "schedule.name=cosine", "schedule.final=1"]
    )
    assert job.optim == Adam(betas=(0.8, 0.9))
    assert job.schedule == Cosine(final=1.0) and isinstance(job.schedule.final, float)


def test_overrides_take_toml_values_and_bare_words_and_the_last_one_counts(job_file):
    job = load_job(
        job_file(),
        [
            "mesh.batch=2",
            "mesh.depth=2",
            "mesh.depth=-1",
            "run.device=gpu",
            'run.dir="a b"',
            "data.augment.flip=[0, 2]",
        ],
    )
    assert job.mesh == {"batch": 2, "depth": -1}
    assert (job.run.device, job.run.dir, job.data.augment.flip) == ("gpu", "a b", (0, 2))


def test_the_resolved_configuration_reads_back_equal(job_file):
    job = load_job(job_file(), ["optim.lr=1e-5", "run.steps=7", "data.train=['a', 'b']", "mesh.depth=2"])
    text = dump_job(job)
    assert load_job(job_file(text)) == job
    assert "async = false" in text and "lr = 1e-05" in text


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("{name = 'vit3d', patch = [2, 4, 4], width = 6, depth = 1, heads = 2}", {"embedding.conv", "head"}),
        ("{name = 'vit3d', refine = 0, width = 6, depth = 1, heads = 2}", {"embedding.conv", "voxels"}),
        ("{name = 'vit3d', positions = 'learned', size = [8, 8, 9], width = 6, depth = 1}", {"embedding.conv", "head"}),
        ("{name = 'swin3d', width = 6, depths = [1, 1], heads = [2, 3], base = 4}", {"embedding.conv", "head"}),
    ],
    ids=["refined", "voxels", "learned", "swin"],
)
def test_transformers_of_volumes_are_made_as_configured(job_file, model, kept):
    job = load_job(job_file(), [f"model={model}", "run.compute=bfloat16"])
    assert load_job(job_file(dump_job(job))) == job
    with VirtualMesh({"batch": 1}):
        network = make_task(job).make_model()
    assert type(network).__name__ == type(job.model).__name__ and network.classes == job.model.classes
    given = {name for name, m in network.named_modules() if getattr(m, "compute_dtype", "") == "float32"}
    assert given == kept


def test_variants_read_back_equal(job_file):
    text = '[model]\nname = "cosmoflow"\n[loss]\nname = "mse"\n[optim]\nname = "sgd"\nnesterov = true\nmomentum = 0.9\n'
    job = load_job(job_file(text))
    assert job.model == CosmoFlow() and load_job(job_file(dump_job(job))) == job


def test_every_default_can_be_written_and_read(job_file):
    job = load_job(job_file())
    table = toml.loads(dump_job(job))
    for field in dataclasses.fields(job):
        assert field.name in table


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ([], {"down0.conv1", "head"}),
        (["run.compute_except=['*.conv2']"], {"down0.conv2", "bottom.conv2", "merge0.conv2"}),
        (["run.compute_except=[]"], set()),
    ],
)
def test_the_configuration_says_which_convolutions_compute_in_bfloat16(job_file, keys, kept):
    job = load_job(job_file(), ["model.base=1", "model.levels=1", "run.compute=bfloat16", *keys])
    assert load_job(job_file(dump_job(job))) == job
    with VirtualMesh({"batch": 1}):
        model = make_task(job).make_model()
    chosen = {name: m.compute_dtype for name, m in model.named_modules() if hasattr(m, "compute_dtype")}
    assert {name for name, dtype in chosen.items() if dtype == "float32"} == kept and len(chosen) == 8


def test_an_exception_from_bfloat16_that_names_no_convolution_is_a_mistake(job_file):
    job = load_job(job_file(), ["run.compute=bfloat16", "run.compute_except=['tail']"])
    with VirtualMesh({"batch": 1}), pytest.raises(ConfigError, match="run.compute_except: tail: no layer"):
        make_task(job).make_model()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.setps=3", ["--set run.setps=3", "unknown key run.setps", "did you mean run.steps?"]),
        ("rum.steps=3", ["unknown key rum", "did you mean run?"]),
        ("model={name = 'gpt', vocab_size = 9}", ["unknown key model.vocab_size", "did you mean model.vocabulary?"]),
        ("run.lr=0.1", ["unknown key run.lr", "did you mean optim.lr?"]),
        ("optim.momentum=0.9", ["unknown key optim.momentum", "it belongs to sgd", "name = 'adamw'"]),
        ("run.steps=many", ["run.steps must be an integer, got 'many' (a string)"]),
        ("run.steps=2.5", ["run.steps must be an integer, got 2.5 (a number)"]),
        ("run.steps=true", ["run.steps must be an integer, got true"]),
        ("run.steps=0", ["run.steps must be at least 1, got 0"]),
        ("model.dropout=1.5", ["model.dropout must be at most 1.0, got 1.5"]),
        ("model.dropout=nan", ["model.dropout must be a number, got nan"]),
        ("run.dtype=float16", ["run.dtype must be one of float32, float64, got 'float16'"]),
        ("run.compute=float8", ["run.compute must be one of float32, bfloat16, float16, got 'float8'"]),
        ("run={compute = 'bfloat16', dtype = 'float64'}", ["compute = 'bfloat16' is for dtype = 'float32'"]),
        ("run={compute = 'bfloat16', device = 'gpu'}", ["on device = 'cpu'"]),
        ("run.compute_except=['head']", ["compute_except has no effect without compute = 'bfloat16'"]),
        ("run.dir=7", ["run.dir must be a string, got 7"]),
        ("model.batch_norm=1", ["model.batch_norm must be true or false, got 1"]),
        ("model.name=unet", ["unet3d, vit3d, swin3d, cosmoflow, gpt, llama, got 'unet'", "did you mean unet3d?"]),
        ("model={name = 'vit3d', heads = 5}", ["192 channels of a token do not divide into 5 heads"]),
        ("model={name = 'vit3d', positions = 'learned'}", ["size is [depth, height, width] with learned positions"]),
        ("model={name = 'swin3d', heads = [3, 6]}", ["depths and heads have a number for each stage"]),
        ("optim.betas=[0.9]", ["optim.betas must be a list of 2, got [0.9] (a list)"]),
        ("data.augment.flip=[0, 1.5]", ["data.augment.flip must be a list whose every entry is an integer"]),
        ("data.train=3", ["data.train must be a string or a list, got 3"]),
        ("mesh.depth=0", ["lengths are at least 1"]),
        ("data.augment.flip=[0, 3]", ["data.augment.flip must be at most 2"]),
        ("mesh.depth=two", ["mesh must be a table whose every value is an integer, and depth = 'two' (a string)"]),
        ("layout.depth=deepth", ["layout.depth names the axis 'deepth'", "did you mean depth?"]),
        ("mesh.dept=2", ["mesh axis dept splits nothing", "depth"]),
        ("mesh=2", ["mesh must be a table, got 2"]),
        ("checkpoint.every=-5", ["checkpoint.every must be at least 0, got -5"]),
        ("checkpoint.async=1", ["checkpoint.async must be true or false, got 1"]),
        ("checkpoint={async = true, one_file = true}", ["async and one_file exclude each other"]),
        ("run", ["--set run: expected key=value"]),
        ("run..steps=1", ["expected key=value"]),
        ("run.dir=[1,", ["no TOML value"]),
        ("model.classes.x=1", ["model.classes is a value, not a table"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_one_line_for_a_mistake(job_file, override, words):
    found = mistakes(job_file(), override)
    assert len(found) == 1
    for word in words:
        assert word in found[0]


def test_all_mistakes_are_told_at_once_with_their_source(job_file):
    path = job_file('[model]\nname = "unet3d"\nwidth = 3\n[loss]\n[run]\nsteps = 1\nepochs = 1\n')
    found = mistakes(path, "run.sede=4")
    assert len(found) == 4
    assert found[0].startswith(f"{path}: unknown key model.width; it belongs to vit3d, swin3d, cosmoflow")
    assert found[1].startswith(f"{path}: loss.name is missing: one of cross_entropy, dice")
    assert found[2].startswith("--set run.sede=4: unknown key run.sede; did you mean run.seed?")
    assert found[3] == f"{path}: [run] steps and epochs are both given; which one ends the run?"


def test_a_missing_table_says_what_to_give(job_file):
    found = mistakes(job_file("[run]\n"))[0]
    assert "model is missing: give a table with name = 'unet3d' or 'vit3d' or 'swin3d' or 'cosmoflow'" in found


def test_a_file_that_is_no_toml_names_the_place(job_file):
    path = job_file("[run\nsteps = 1\n")
    (found,) = mistakes(path)
    assert found.startswith(f"{path}: ") and "line 1" in found
    with pytest.raises(FileNotFoundError):
        load_job(path.with_name("other.toml"))


def test_a_mesh_axis_may_have_any_name_that_the_layout_uses(job_file):
    job = load_job(job_file(), ["mesh.z=2", "layout.depth=['z', 'depth']"])
    assert job.layout.axes("depth") == ("z", "depth") and job.layout.axes("batch") == ("batch",)
    assert load_job(job_file(), ['layout.depth=""']).layout.axes("depth") == ()


def test_tables_without_a_file():
    table = {"model": {"name": "cosmoflow"}, "loss": {"name": "l1"}, "mesh": {"batch": 2, "model": 2}}
    assert make_job(table).mesh == {"batch": 2, "model": 2}
    with pytest.raises(ConfigError, match="notebook: unknown key modle; did you mean model"):
        make_job({**table, "modle": {}}, "notebook")


def test_the_writer_keeps_every_string_and_number():
    table = {
        "text": 'quote " backslash \\ tab \t line \n bell \x07 ü 漢',
        "numbers": [1, -2, 0.1, 1e300, -5e-324, float("inf")],
        "flags": [True, False],
        "a.b": {"c d": {"e": []}, "empty": {}},
    }
    assert toml.loads(toml.dumps(table)) == table
    with pytest.raises(TypeError):
        toml.dumps({"none": None})
    with pytest.raises(ValueError, match="more than one"):
        toml.loads_value("1\nseed = 2")
