import pytest

from echo2.config import load_config
from echo2.learning.torch_learner import TorchLearner
from echo2.models.preparation import prepare_model


@pytest.fixture(scope="session")
def random_model_folder(tmp_path_factory):
    """The tiny model with random weights."""
    cache = tmp_path_factory.mktemp("models")
    config = load_config([], ["model.warm_start_exact_match=0", f"model.cache_directory={cache}"])
    return prepare_model(config, print)


@pytest.fixture
def make_learner(random_model_folder):
    """Makes learners at version 0 of the same random model, with `section.key=value` settings."""

    def make(*settings):
        return TorchLearner.create(load_config([], ["learner.device=cpu", *settings]), random_model_folder)

    return make
