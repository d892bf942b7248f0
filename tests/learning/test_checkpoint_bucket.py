"""Checkpoints in a bucket, over a real S3 API server."""

import json

import pytest
from learning_batches import random_batch

from echo2.config import load_config
from echo2.dissemination.object_store.bucket import Bucket, ObjectStoreError
from echo2.learning.checkpoint import CheckpointError, CheckpointFolder, Checkpoints
from echo2.learning.checkpoint_bucket import CheckpointBucket
from echo2.learning.checkpoint_stores import open_store
from echo2.learning.simulated_learner import SimulatedLearner

LOCATION = "s3://weights/echo2"
NOWHERE = "http://127.0.0.1:9"


class Run:
    """A run's checkpoints as one start after another finds them, and what the user was told."""

    def __init__(self, server, disk, name="run-1"):
        self.server, self.disk, self.name = server, disk, name
        self.told = []

    def open(self, server=None, keep=2):
        settings = [f"dissemination.object_store_endpoint_url={server or self.server}", f"learner.keep_checkpoints={keep}"]
        config = load_config([], settings)
        bucket = Bucket(config.dissemination, LOCATION, "learner.checkpoints")
        return Checkpoints(CheckpointBucket(bucket, self.name, self.disk, self.told.append), self.name, config.learner)

    def save(self, version, **options):
        checkpoints = self.open(**options)
        checkpoints.save(learner_at(version), cursor=0)
        checkpoints.close()

    @property
    def staged(self):
        return sorted(path.name for path in self.disk.iterdir())


def learner_at(version):
    learner = SimulatedLearner(0.001, 100)
    learner.version = version
    return learner


def keys(s3):
    return sorted(found["Key"] for found in s3.list_objects_v2(Bucket="weights").get("Contents", ()))


def keys_of(version, run="run-1"):
    return [f"echo2/checkpoints/{run}/version-{version:08d}/{file}" for file in ("rehearsal.json", "state.json")]


@pytest.fixture
def run(server, s3, tmp_path):
    return Run(server, tmp_path / "checkpoints")


def test_another_machine_goes_on_exactly(make_learner, server, s3, tmp_path):
    here, there = Run(server, tmp_path / "here"), Run(server, tmp_path / "there")
    learner, other = make_learner(), make_learner()
    batches = [random_batch(learner.model, step, seed=step, noise=0.1) for step in range(3)]
    learner.train_step(batches[0])
    checkpoints = here.open()
    checkpoints.save(learner, cursor=12)
    checkpoints.close()
    assert here.staged == []
    assert there.open().restore_newest(other).cursor == 12
    assert there.staged == []
    assert [other.train_step(batch) for batch in batches[1:]] == [learner.train_step(batch) for batch in batches[1:]]


def test_old_checkpoints_leave_the_bucket_and_those_of_other_runs_stay(run, s3, tmp_path):
    Run(run.server, tmp_path / "other", "run-2").save(1)
    for version in (1, 2, 3):
        run.save(version)
    assert keys(s3) == [*keys_of(2), *keys_of(3), *keys_of(1, "run-2")]
    assert run.open().versions == [2, 3]
    assert run.told == []


def test_an_upload_that_was_cut_off_is_no_checkpoint_and_is_cleared(run, s3):
    run.save(1)
    s3.put_object(Bucket="weights", Key=keys_of(2)[0], Body=b"weights")
    assert run.open().versions == [1]
    run.save(3)
    assert keys(s3) == [*keys_of(1), *keys_of(3)]


def test_what_the_bucket_does_not_take_stays_on_the_disk_and_follows_later(run, s3):
    run.save(1)
    checkpoints = run.open()
    checkpoints._store._bucket = Bucket(
        load_config([], [f"dissemination.object_store_endpoint_url={NOWHERE}"]).dissemination, LOCATION, "learner.checkpoints"
    )
    for version in (2, 3):
        checkpoints.save(learner_at(version), cursor=0)
    checkpoints.close()
    assert run.staged == ["version-00000002", "version-00000003"]
    (told,) = run.told
    assert "learner.checkpoints" in told and "cannot be reached" in told
    later = run.open()
    assert later.versions == [1, 2, 3]
    assert later.restore_newest(learner_at(0)).version == 3
    later.close()
    assert run.staged == []
    assert run.open().versions == [1, 2, 3]


def test_a_bucket_that_cannot_be_read_is_an_error_at_the_start(run):
    with pytest.raises(ObjectStoreError, match=r"learner\.checkpoints = .* cannot be reached"):
        run.open(server=NOWHERE)


def test_a_damaged_checkpoint_in_the_bucket_is_named(run, s3):
    run.save(1)
    s3.put_object(Bucket="weights", Key=keys_of(1)[1], Body=b"{")
    with pytest.raises(CheckpointError, match=r"s3://weights/echo2/checkpoints/run-1/version-00000001 cannot be restored"):
        run.open().restore_newest(learner_at(0))


def test_the_configured_place_is_taken(make_run, server, s3, tmp_path):
    endpoint = f"dissemination.object_store_endpoint_url={server}"
    inside = make_run("run.name=inside")
    outside = make_run("run.name=outside", f"learner.checkpoints={tmp_path / 'elsewhere'}")
    remote = make_run("run.name=remote", f"learner.checkpoints={LOCATION}", endpoint)
    for run in (inside, outside, remote):
        checkpoints = Checkpoints(open_store(run, pytest.fail), run.run_id, run.config.learner)
        checkpoints.save(learner_at(1), cursor=0)
        checkpoints.close()
    assert CheckpointFolder(inside.checkpoints).versions() == [1]
    assert CheckpointFolder(tmp_path / "elsewhere" / outside.run_id).versions() == [1]
    assert keys(s3) == keys_of(1, remote.run_id)


def test_state_is_readable_by_people(run, s3):
    run.save(4)
    body = s3.get_object(Bucket="weights", Key=keys_of(4)[1])["Body"].read()
    assert json.loads(body)["version"] == 4


def test_what_makes_a_checkpoint_whole_comes_last_and_goes_first(run, s3, monkeypatch):
    told = []
    for action in ("upload", "delete"):
        real = getattr(Bucket, action)

        def recorded(bucket, key, *others, action=action, real=real):
            told.append((action, key.rsplit("/", 2)[-2:]))
            return real(bucket, key, *others)

        monkeypatch.setattr(Bucket, action, recorded)
    run.save(1, keep=1)
    run.save(2, keep=1)
    files = [[f"version-{version:08d}", file] for version in (1, 2) for file in ("rehearsal.json", "state.json")]
    assert told == [*(("upload", file) for file in files), ("delete", files[1]), ("delete", files[0])]
