"""A checkpoint that its disk has no room for."""

import pytest
from checkpointing import checkpoints_in, restored, saved
from learning_batches import random_batch

from echo2.errors import DiskError

MB = 1_000_000


@pytest.mark.parametrize("room_mb", [0, 1.0, 3.0], ids=["for nothing", "for a part of the weights", "for the weights alone"])
def test_a_checkpoint_that_has_no_room_is_named_and_the_one_before_it_stays(make_learner, small_disk, room_mb):
    disk, learner = small_disk(40 * MB), make_learner()
    learner.train_step(random_batch(learner.model, 0, seed=0, noise=0.1))
    folder = disk.path / "checkpoints"
    saved(learner, folder)
    learner.train_step(random_batch(learner.model, 1, seed=1, noise=0.1))
    disk.fill(int(room_mb * MB))
    free_bytes = disk.free_bytes
    with pytest.raises(DiskError, match=r"checkpoints/version-00000002 cannot be written \(No space left on device\)"):
        saved(learner, folder)
    assert [path.name for path in folder.iterdir()] == ["version-00000001"] and disk.free_bytes == free_bytes
    assert restored(make_learner(), folder).version == 1
    disk.make_room()
    saved(learner, folder)
    assert checkpoints_in(folder).versions == [1, 2]
