"""The roofline: figures of GPUs, shapes of models, estimates of throughput."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.capacity import roofline
from echo2.capacity.roofline import GIB, Gpu, ModelShape, estimate_throughput, find_gpu, known_gpus
from echo2.errors import UserError

seeded = settings(derandomize=True, deadline=None)

LLAMA_8B = ModelShape(8_030_261_248, layers=32, attention_heads=32, kv_heads=8, head_dim=128)
LLAMA_70B = ModelShape(70_553_706_496, layers=80, attention_heads=64, kv_heads=8, head_dim=128)

# Streaming multiprocessors, dense bf16 operations of each per clock, boost clock in GHz; bus width in bits, Gbit/s per pin.
SILICON = {
    "RTX 3090": (82, 512, 1.695, 384, 19.5),
    "RTX A6000": (84, 1024, 1.800, 384, 16.0),
    "RTX 4090": (128, 512, 2.520, 384, 21.0),
    "RTX 5090": (170, 512, 2.407, 512, 28.0),
    "L4": (58, 1024, 2.040, 192, 12.5),
    "L40S": (142, 1024, 2.520, 384, 18.0),
    "A10G": (80, 512, 1.710, 384, 12.5),
    "A100-40GB SXM": (108, 2048, 1.410, 5120, 2.43),
    "A100-80GB SXM": (108, 2048, 1.410, 5120, 3.186),
    "A100-80GB PCIe": (108, 2048, 1.410, 5120, 3.024),
    "H100 SXM": (132, 4096, 1.830, 5120, 5.24),
    "H200 SXM": (132, 4096, 1.830, 6144, 6.25),
    "B200": (148, 8192, 1.860, 8192, 7.81),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Gpu, ModelShape, dict[str, int]]:
    """A GPU, a model that fits on it, and lengths."""
    kv_heads = draw(st.integers(1, 16))
    model = ModelShape(
        parameters=draw(st.integers(10**8, 10**10)),
        layers=draw(st.integers(1, 80)),
        attention_heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
    )
    gpu = Gpu("drawn", draw(st.integers(64, 200)), draw(st.integers(100, 9000)), draw(st.integers(10, 3000)), "drawn")
    lengths = {
        "prompt_tokens": draw(st.integers(1, 4000)),
        "completion_tokens": draw(st.integers(1, 8000)),
        "members": draw(st.integers(1, 64)),
    }
    return gpu, model, lengths


def test_doctests_hold() -> None:
    found = doctest.testmod(roofline)
    assert found.attempted >= 7 and found.failed == 0


def test_every_gpu_on_file_names_its_source() -> None:
    assert set(known_gpus()) == set(SILICON)
    assert all(gpu.source.startswith("NVIDIA ") for gpu in known_gpus().values())


@pytest.mark.parametrize("name", SILICON)
def test_datasheet_figures_follow_from_the_silicon_and_are_dense(name: str) -> None:
    multiprocessors, operations_per_clock, clock_ghz, bus_bits, pin_gbit_per_s = SILICON[name]
    gpu = find_gpu(name)
    assert gpu.bf16_dense_tflops == pytest.approx(multiprocessors * operations_per_clock * clock_ghz / 1000, rel=0.02)
    assert gpu.memory_bandwidth_gb_per_s == pytest.approx(bus_bits * pin_gbit_per_s / 8, rel=0.005)


def test_a_gpu_that_is_not_on_file_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"'V100'.*RTX 4090.*B200"):
        find_gpu("V100")


SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "kind",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "attention_bias": True, "head_dim": 20},
    ],
    ids=lambda kind: "-".join(map(str, kind.values())),
)
def test_parameters_are_counted_as_the_model_itself_has_them(kind: dict[str, object], tied: bool) -> None:
    config = SMALL | kind | {"tie_word_embeddings": tied}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shape = ModelShape.from_config(config)
    assert shape.parameters == sum(weights.numel() for weights in model.parameters())
    assert (shape.layers, shape.attention_heads, shape.kv_heads, shape.head_dim) == (3, 6, 2, config["head_dim"])


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
            8_030_261_248,
        ),
        (
            {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
            | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
            7_615_616_512,
        ),
        (
            {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936},
            8_190_735_360,
        ),
    ],
    ids=["Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B"],
)
def test_parameters_of_published_models_are_those_published(config: dict[str, object], parameters: int) -> None:
    assert ModelShape.from_config(config).parameters == parameters


def test_other_dense_decoders_need_their_parameters_and_mixtures_of_experts_are_refused() -> None:
    other = SMALL | {"model_type": "gemma2"}
    assert ModelShape.from_config(other, parameters=2_000_000, weight_bytes=1.0).weights_bytes == 2_000_000
    with pytest.raises(UserError, match=r"'gemma2'.*parameters"):
        ModelShape.from_config(other)
    with pytest.raises(UserError, match="'qwen3_moe' is a mixture of experts"):
        ModelShape.from_config(SMALL | {"model_type": "qwen3_moe", "num_experts": 128}, parameters=30_000_000_000)
    with pytest.raises(UserError, match="no vocab_size"):
        ModelShape.from_config({key: value for key, value in SMALL.items() if key != "vocab_size"} | {"model_type": "llama"})


def test_a_model_that_does_not_fit_is_refused_with_the_gigabytes() -> None:
    refused = r"1 × H100 SXM: 131.42 GiB of weights and 0.47 GiB of key-value cache .* exceed 72.00 GiB, the usable 90%"
    with pytest.raises(UserError, match=refused):
        estimate_throughput(find_gpu("H100 SXM"), LLAMA_70B, 512, 1024, members=8)
    spread = estimate_throughput(find_gpu("H100 SXM"), LLAMA_70B, 512, 1024, members=8, tensor_parallel=4)
    assert spread.kv_cache_gib == pytest.approx(4 * 72 - 131.415, abs=0.01)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens = 0"),
        ({"completion_tokens": -1}, "completion_tokens = -1"),
        ({"members": 1.5}, "members = 1.5"),
        ({"tensor_parallel": 0}, "tensor_parallel = 0"),
        ({"efficiency": math.nan}, "efficiency = nan"),
        ({"efficiency": 1.01}, "efficiency = 1.01"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_numbers_are_named(change: dict[str, float], part: str) -> None:
    numbers: dict[str, float] = {"prompt_tokens": 100, "completion_tokens": 100, "members": 8}
    with pytest.raises(UserError) as refused:
        estimate_throughput(find_gpu("L40S"), LLAMA_8B, **(numbers | change))  # type: ignore[arg-type]
    assert part in str(refused.value)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_gpus_and_models_with_impossible_figures_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="memory_bandwidth_gb_per_s of GPU odd"):
        Gpu("odd", 24, value, 100, "none")
    with pytest.raises(UserError, match="weight_bytes of the model"):
        replace(LLAMA_8B, weight_bytes=value)


@seeded
@given(cases())
def test_slots_are_as_many_sequences_as_the_memory_holds(case: tuple[Gpu, ModelShape, dict[str, int]]) -> None:
    gpu, model, lengths = case
    found = estimate_throughput(gpu, model, **lengths)
    tokens = lengths["prompt_tokens"] + lengths["completion_tokens"]
    sequence_gib = tokens * 2 * model.layers * model.kv_heads * model.head_dim * 2 / GIB
    assert found.slots * sequence_gib <= found.kv_cache_gib < (found.slots + 1) * sequence_gib + 1e-9
    assert found.source == "estimate"


@seeded
@given(cases())
def test_groups_per_second_times_latency_are_the_groups_in_flight(case: tuple[Gpu, ModelShape, dict[str, int]]) -> None:
    gpu, model, lengths = case
    found = estimate_throughput(gpu, model, **lengths)
    in_flight = found.groups_per_s * found.group_latency_s
    assert in_flight == pytest.approx(found.slots / lengths["members"] * math.ceil(lengths["members"] / found.slots))
    assert found.tokens_per_s == pytest.approx(found.groups_per_s * lengths["members"] * lengths["completion_tokens"])


@seeded
@given(cases(), st.floats(1.01, 4.0))
def test_more_bandwidth_compute_memory_or_efficiency_is_never_slower(
    case: tuple[Gpu, ModelShape, dict[str, int]], factor: float
) -> None:
    gpu, model, lengths = case
    base = estimate_throughput(gpu, model, **lengths, efficiency=0.2)
    for name in ("memory_bandwidth_gb_per_s", "bf16_dense_tflops", "memory_gib"):
        better = replace(gpu, **{name: getattr(gpu, name) * factor})
        assert estimate_throughput(better, model, **lengths, efficiency=0.2).groups_per_s >= base.groups_per_s * (1 - 1e-9)
    efficient = estimate_throughput(gpu, model, **lengths, efficiency=0.2 * factor)
    assert efficient.groups_per_s == pytest.approx(base.groups_per_s * factor)


@seeded
@given(cases(), st.integers(1, 4000))
def test_longer_completions_or_prompts_give_fewer_groups(case: tuple[Gpu, ModelShape, dict[str, int]], more: int) -> None:
    gpu, model, lengths = case
    base = estimate_throughput(gpu, model, **lengths)
    for name in ("completion_tokens", "prompt_tokens"):
        longer = estimate_throughput(gpu, model, **(lengths | {name: lengths[name] + more}))
        assert longer.groups_per_s < base.groups_per_s


@seeded
@given(cases(), st.sampled_from([1, 2, 3, 4]))
def test_twice_the_tensor_parallelism_is_never_slower(case: tuple[Gpu, ModelShape, dict[str, int]], degree: int) -> None:
    gpu, model, lengths = case
    base = estimate_throughput(gpu, model, **lengths, tensor_parallel=degree)
    double = estimate_throughput(gpu, model, **lengths, tensor_parallel=2 * degree)
    assert double.groups_per_s >= base.groups_per_s * (1 - 1e-9)
    assert double.slots >= base.slots


def test_members_beyond_the_slots_come_in_waves() -> None:
    one_wave = estimate_throughput(find_gpu("L4"), LLAMA_8B, 512, 1024, members=35)
    two_waves = estimate_throughput(find_gpu("L4"), LLAMA_8B, 512, 1024, members=36)
    assert (one_wave.slots, two_waves.slots) == (35, 35)
    assert two_waves.group_latency_s == 2 * one_wave.group_latency_s
    assert two_waves.tokens_per_s == pytest.approx(one_wave.tokens_per_s)


@pytest.mark.parametrize(("degree", "held_heads"), [(1, 8), (3, 9), (8, 8), (16, 16)])
def test_gpus_hold_whole_heads_and_copies_where_there_are_more_gpus_than_heads(degree: int, held_heads: int) -> None:
    found = estimate_throughput(find_gpu("H100 SXM"), LLAMA_8B, 512, 1024, members=8, tensor_parallel=degree)
    assert found.kv_cache_gib == pytest.approx(degree * 72 - 8_030_261_248 * 2 / GIB)
    assert found.slots == math.floor(found.kv_cache_gib * GIB / (1536 * 2 * 32 * held_heads * 128 * 2))


@pytest.mark.parametrize("name", SILICON)
def test_one_stream_of_an_8b_model_is_slower_than_the_bandwidth_over_its_16_gb(name: str) -> None:
    found = estimate_throughput(find_gpu(name), LLAMA_8B, 512, 1024, members=8, efficiency=1.0)
    assert 1 / found.decode_step_s < find_gpu(name).memory_bandwidth_gb_per_s / 16.06


def test_an_8b_model_on_an_h100_makes_some_thousand_tokens_per_second_as_serving_engines_do() -> None:
    h100 = estimate_throughput(find_gpu("H100 SXM"), LLAMA_8B, 512, 1024, members=8)
    assert 5_000 < h100.tokens_per_s < 30_000
    assert 100 < h100.slots < 1_000
    assert h100.bound == "memory"
    l4 = estimate_throughput(find_gpu("L4"), LLAMA_8B, 512, 1024, members=8)
    assert 100 < l4.tokens_per_s < h100.tokens_per_s / 10


def test_a_short_context_and_much_memory_make_decoding_compute_bound() -> None:
    small = replace(LLAMA_8B, parameters=600_000_000, kv_heads=1)
    assert estimate_throughput(find_gpu("RTX 4090"), small, 16, 32, members=8).bound == "compute"
