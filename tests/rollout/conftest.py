"""An engine with a small random model, with and without tied embeddings."""

from pathlib import Path

import pytest
from drawn import make_model
from transformers import Qwen3ForCausalLM

from echo2.models.loading import export_weights
from echo2.rollout.transformers_engine import TransformersEngine


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> Qwen3ForCausalLM:
    return make_model(0, request.param)


@pytest.fixture(scope="module")
def folder(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def engine(model: Qwen3ForCausalLM, folder: Path) -> TransformersEngine:
    engine = TransformersEngine(folder, "float32", "cpu", threads=1)
    engine.load_weights(export_weights(model, "float32"), 5)
    return engine
