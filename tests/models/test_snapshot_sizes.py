"""How large snapshots will be is told from the headers of the weights, and a cap that is too small for them with figures."""

import pytest
import torch
from safetensors.torch import save_file

from echo2.capacity.transfer import cap_warning
from echo2.config import load_config
from echo2.models.recipe import tiny_architecture
from echo2.models.sizes import TINY_PARAMETERS, snapshot_bytes

MB = 1_000_000


def config(*settings):
    return load_config([], list(settings))


def test_the_size_follows_from_the_weights_in_the_models_folder_and_the_type_that_is_sent(tmp_path):
    save_file({"a": torch.zeros(10, 30), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"c": torch.zeros(100, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    assert snapshot_bytes(config(f"model.path={tmp_path}")) == 4 * 407
    assert snapshot_bytes(config(f"model.path={tmp_path}", "model.dtype=bfloat16")) == 2 * 407
    assert snapshot_bytes(config(f"model.path={tmp_path}", "capacity.snapshot_bytes=5")) == 5
    (tmp_path / "model-2.safetensors").write_bytes(b"no weights")
    assert snapshot_bytes(config(f"model.path={tmp_path}")) == 4 * 307


def test_the_tiny_model_has_about_as_many_parameters_as_is_told():
    sizes = tiny_architecture()
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    attention = 2 * hidden * head * (sizes["num_attention_heads"] + sizes["num_key_value_heads"])
    layers = sizes["num_hidden_layers"] * (attention + 3 * hidden * inner)
    assert layers == pytest.approx(TINY_PARAMETERS, rel=0.05), "the embedding of some hundred characters comes on top"


@pytest.mark.parametrize(
    ("settings", "too_late"),
    [
        (["dissemination.uplink_bytes_per_s=100_000"], False),
        (["dissemination.uplink_bytes_per_s=80_000"], True),
        (["dissemination.uplink_bytes_per_s=80_000", "dissemination.timeout_s=126"], False),
        (["dissemination.uplink_bytes_per_s=200_000", "dissemination.peers=false", "fleet.workers=2"], False),
        (["dissemination.uplink_bytes_per_s=200_000", "dissemination.peers=false", "fleet.workers=3"], True),
        ([], False),
    ],
)
def test_a_cap_is_too_small_where_a_snapshot_in_full_takes_longer_than_workers_are_waited_for(settings, too_late):
    assert bool(cap_warning(config(*settings), 10 * MB)) == too_late


def test_the_warning_names_the_least_cap_that_is_of_use():
    told = cap_warning(config("dissemination.uplink_bytes_per_s=1000", "staleness.bound=3"), 12 * MB)
    assert "about 12 MB" in told and "200 min 0 s" not in told and "3 h 20 min" in told
    assert "3 steps" in told and "a cap of 100 kB/s is the least" in told
    assert cap_warning(config("dissemination.uplink_bytes_per_s=100_000"), 12 * MB) == ""
