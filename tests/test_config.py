"""What a configuration may say, and what a user is told who says something else."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2 import config_activation, config_sections, config_tasks
from echo2.config import Config, dump_toml, load_config, override, worker_settings
from echo2.config_base import Section
from echo2.config_tasks import ReverseDigitsTask
from echo2.errors import ConfigError

MODULES = (config_sections, config_tasks, config_activation)
KINDS = [kind for module in MODULES for kind in vars(module).values() if isinstance(kind, type)]
SECTIONS = sorted({kind for kind in KINDS if issubclass(kind, Section) and kind is not Section}, key=lambda kind: kind.__name__)


def refusal(*overrides, files=()):
    """The one line that a configuration is refused with."""
    with pytest.raises(ConfigError) as raised:
        load_config(files, overrides)
    sentence = str(raised.value)
    assert sentence and "\n" not in sentence
    return sentence


def test_the_defaults_are_a_valid_run():
    assert load_config([]) == Config()


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_every_section_and_every_field_says_what_it_is(kind):
    assert kind.__doc__ and kind.__doc__.strip()
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("staleness.bond=2", ("staleness.bond", "2", "unknown")),
        ("stalenes.bound=2", ("stalenes", "unknown")),
        ("staleness.bound=-1", ("staleness.bound", "-1", "0")),
        ("staleness.bound=0.5", ("staleness.bound", "0.5", "integer")),
        ("staleness.bound=two", ("staleness.bound", "two", "integer")),
        ("staleness.publish_interval=0", ("staleness.publish_interval", "0")),
        ("staleness.publish_interval=4", ("publish_interval = 4", "bound + 1 = 3", "lower", "raise bound to 3")),
        ("dissemination.chunk_bytes=5", ("chunk_bytes = 5", "choose 1024 or more, or 0")),
        ("worker.peer_port=8701", ("peer_port = 8701", "fleet.workers = 2", "fleet.workers=0")),
        ("dissemination.retain_snapshots=2", ("retain_snapshots = 2", "publish_interval = 3", "raise it to 3")),
        ("batch.members=1", ("members = 1", "drop_zero_variance", "2 or more")),
        ("batch.groups=0", ("batch.groups", "0")),
        ("sampling.temperature=0", ("sampling.temperature", "0")),
        ("capacity.accepted_share=1.5", ("capacity.accepted_share", "1.5", "1")),
        ("hub.heartbeat_timeout_s=1", ("heartbeat_timeout_s = 1", "heartbeat_interval_s = 2", "at least 6")),
        ("hub.port=65536", ("hub.port", "65536", "65535")),
        ("run.name=../elsewhere", ("run.name", "../elsewhere")),
        ("model.dtype=float16", ("model.dtype", "float16", "bfloat16")),
        ("task.type=riddles", ("riddles", "reverse_digits", "python")),
        ("learner.device=gpu", ("learner.device", "gpu", "cuda")),
        ("worker.device=cuda:x", ("worker.device", "cuda:x", "cpu")),
        ("learner.learning_rate=nan", ("learner.learning_rate", "nan")),
        ("learner.learning_rate=-nan", ("learner.learning_rate", "nan")),
        ("learner.learning_rate=inf", ("learner.learning_rate", "inf", "finite")),
        ("hub.lease_timeout_s=inf", ("hub.lease_timeout_s", "inf", "finite")),
        ("worker.slots=inf", ("worker.slots", "inf")),
        ("learner.engine=simulated", ("learner.engine = 'simulated'", "worker.engine = 'transformers'", "engine=torch")),
        ("worker.simulated_latency_cv=-1", ("worker.simulated_latency_cv", "-1", "0")),
        ("dissemination.uplink_bytes_per_s=-1", ("dissemination.uplink_bytes_per_s", "-1", "0")),
        ("dissemination.object_store=weights/echo2", ("dissemination.object_store = 'weights/echo2'", "s3://BUCKET/PREFIX")),
        ("dissemination.object_store=s3://Weights", ("dissemination.object_store = 's3://Weights'", "s3://BUCKET/PREFIX")),
        ("dissemination.object_store_endpoint_url=minio:9000", ("endpoint_url = 'minio:9000'", "https://HOST:PORT")),
        ("dissemination.object_store_endpoint_url=http://me:word@minio", ("endpoint_url", "credentials")),
        ("dissemination.object_store_concurrency=0", ("dissemination.object_store_concurrency", "0", "1")),
        ("worker.snapshot_source=object_store", ("snapshot_source = 'object_store'", "dissemination.object_store=s3://BUCKET")),
        ("activation.max_domain_share=0", ("activation.max_domain_share", "0")),
        ("activation.failure_domain=planet", ("activation.failure_domain", "planet", "zone", "cloud")),
        ("activation.quotas=[{cloud='aws'}]", ("activation.quotas.0.accelerators", "required")),
        ("activation.quotas=[{cloud='aws', accelerators=1, spot=true}]", ("activation.quotas.0.spot", "unknown key")),
        ("activation.places=[{cloud='', egress_usd_per_gb=1.0}]", ("activation.places.0.cloud",)),
        ("worker.snapshot_source=hub", ("worker.snapshot_source", "hub", "auto", "object_store")),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_name_and_its_numbers(setting, parts):
    sentence = refusal(setting)
    assert [part for part in parts if part not in sentence] == [], sentence


def test_one_member_is_enough_where_groups_without_variance_are_kept():
    assert load_config([], ["batch.members=1", "batch.drop_zero_variance=false"]).batch.members == 1


def test_one_port_for_two_listeners_is_refused_where_both_are_there():
    settings = ["hub.port=8700", "dissemination.port=8700"]
    assert "hub.port = dissemination.port = 8700" in refusal(*settings)
    assert load_config([], [*settings, "dissemination.peers=false"]).hub.port == 8700


@pytest.mark.parametrize("bound", [0, 1, 5])
def test_the_greatest_publish_interval_is_one_above_the_bound(bound):
    settings = [f"staleness.bound={bound}", "dissemination.retain_snapshots=99"]
    assert load_config([], [*settings, f"staleness.publish_interval={bound + 1}"]).staleness.publish_interval == bound + 1
    assert f"bound + 1 = {bound + 1}" in refusal(*settings, f"staleness.publish_interval={bound + 2}")


def test_digits_out_of_order_are_refused_with_both_numbers():
    for task in ("reverse_digits", "sort_digits"):
        sentence = refusal(f"task.type={task}", "task.min_digits=7", "task.max_digits=4")
        assert "min_digits = 7" in sentence and "max_digits = 4" in sentence


def test_what_a_worker_sets_for_itself_is_judged_together_with_its_run_only():
    settings = ["worker.snapshot_source=object_store", "worker.heartbeat_interval_s=60"]
    assert worker_settings(settings).heartbeat_interval_s == 60
    run = load_config([], ["dissemination.object_store=s3://weights", "hub.heartbeat_timeout_s=180"])
    assert override(run, settings).worker.snapshot_source == "object_store"
    with pytest.raises(ConfigError, match=r"worker\.slots = 0"):
        worker_settings(["worker.slots=0"])


def test_every_problem_is_named_at_once():
    sentence = refusal("staleness.bound=-1", "batch.groups=0", "hub.prot=1")
    assert all(name in sentence for name in ("staleness.bound", "batch.groups", "hub.prot"))


def test_an_override_that_is_not_one_is_refused():
    for text in ("staleness.bound", "staleness=2", "=2", ".=2", ".bound=2", "staleness.=2"):
        assert "section.key=value" in refusal(text)


def test_a_file_that_is_missing_broken_or_not_text_is_named(tmp_path):
    assert "does not exist" in refusal(files=[tmp_path / "none.toml"])
    assert "cannot be read" in refusal(files=[tmp_path])
    for content in (b"[run", b"[run]\nsteps = 1\nsteps = 2\n", b"\xff\xfe", b"[run]\nname = demo\n"):
        file = tmp_path / "broken.toml"
        file.write_bytes(content)
        sentence = refusal(files=[file])
        assert str(file) in sentence and "not valid TOML" in sentence


def test_later_files_win_over_earlier_ones_and_overrides_over_files(tmp_path):
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text("[run]\nsteps = 1\nseed = 1\n[batch]\ngroups = 1\nmembers = 3\n")
    second.write_text("[run]\nseed = 2\n[batch]\ngroups = 2\n")
    config = load_config([first, second], ["batch.groups=3", "batch.groups=4"])
    assert (config.run.steps, config.run.seed, config.batch.groups, config.batch.members) == (1, 2, 4, 3)
    assert load_config([second, first]).run.seed == 1


def test_a_task_of_another_type_takes_nothing_over_from_the_former_one(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[task]\ntype = "reverse_digits"\nmin_digits = 2\n')
    assert load_config([file], ["task.max_digits=9"]).task.model_dump() == {
        "type": "reverse_digits",
        "min_digits": 2,
        "max_digits": 9,
        "exact_match_weight": 0.5,
    }
    assert load_config([file], ["task.type=arithmetic"]).task.model_dump() == {
        "type": "arithmetic",
        "max_operand": 99,
        "operators": "+",
        "exact_match_weight": 1.0,
    }


def test_an_override_changes_what_it_names_and_nothing_else():
    before = load_config([], ["run.steps=7"])
    after = override(before, ["worker.slots=64"])
    assert (after.run.steps, after.worker.slots) == (7, 64)
    assert after.model_copy(update={"worker": before.worker}) == before
    with pytest.raises(ConfigError, match=r"worker\.slot "):
        override(before, ["worker.slot=64"])


def test_values_of_overrides_are_toml_and_else_plain_text():
    config = load_config(
        [],
        [
            "run.name=plain",
            'run.directory="quoted folder"',
            "batch.drop_zero_variance=false",
            "task.type=python",
            "task.path=a.b:C",
            'task.options={depth = 2, words = ["x"]}',
        ],
    )
    assert (config.run.name, str(config.run.directory), config.batch.drop_zero_variance) == ("plain", "quoted folder", False)
    assert config.task.options == {"depth": 2, "words": ["x"]}


def test_a_configuration_cannot_be_changed_after_it_was_checked():
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.staleness.bound = 9


positive = st.floats(min_value=1e-6, max_value=1e6)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(
    name=st.text(string.ascii_letters + string.digits, min_size=1, max_size=64),
    directory=texts,
    seed=st.integers(0, 2**62),
    bound=st.integers(0, 20),
    lateness=st.integers(0, 20),
    temperature=st.floats(1e-3, 1e3),
    learning_rate=st.floats(1e-6, 10.0),
    drop=st.booleans(),
    options=st.dictionaries(texts, st.one_of(st.integers(-(2**62), 2**62), st.booleans(), texts, positive, st.lists(texts))),
)
def test_a_dumped_configuration_reads_back_equal(
    tmp_path_factory, name, directory, seed, bound, lateness, temperature, learning_rate, drop, options
):
    config = Config.model_validate(
        {
            "run": {"name": name, "directory": directory, "seed": seed},
            "task": {"type": "python", "path": "my.module:Task", "options": options},
            "batch": {"members": 2, "drop_zero_variance": drop},
            "sampling": {"temperature": temperature},
            "staleness": {"bound": bound, "publish_interval": min(lateness, bound) + 1},
            "learner": {"learning_rate": learning_rate},
            "dissemination": {"retain_snapshots": 2 * bound + 1},
        }
    )
    file = tmp_path_factory.mktemp("dumped") / "config.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    assert load_config([file]) == config
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_a_task_section_without_a_type_changes_the_default_task(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[task]\nmax_digits = 9\n")
    assert load_config([file]) == load_config([], ["task.max_digits=9"])
    assert load_config([file]).task == ReverseDigitsTask(max_digits=9)


def test_a_key_is_named_as_it_is_written():
    assert refusal("task.type=arithmetic", "task.max_operand=0").startswith("task.max_operand = 0: ")
    assert refusal("task.max_digit=9").startswith("unknown key task.max_digit = 9: ")
    assert refusal("task.type=python").startswith("task.path")


@pytest.mark.parametrize(
    "setting", ["run.steps=true", "learner.learning_rate=true", "hub.port='80'", "batch.groups=2.5", "run.steps=1e3"]
)
def test_a_value_of_another_kind_is_refused_rather_than_converted(setting):
    assert refusal(setting).startswith(setting.split("=")[0] + " = ")
