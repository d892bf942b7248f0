"""Every number of a configuration has a least and a greatest value, and a plan can be made at each."""

import math

import pytest

from echo2.capacity.plan import make_plan
from echo2.config import Config, load_config
from echo2.errors import ConfigError

SCHEMA = Config.model_json_schema()
LEAST, GREATEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
PLANNED = ("run", "batch", "staleness", "fleet", "dissemination", "capacity")
"""Sections that a plan is made from."""
COMPANIONS = {
    "staleness.bound": ("dissemination.retain_snapshots=600",),
    "staleness.publish_interval": ("staleness.bound=256", "dissemination.retain_snapshots=600"),
}


def numbers(model=SCHEMA, path=()):
    """(dotted key, schema) of every number that a configuration can have; tables in lists have `0` as a key."""
    for key, field in model["properties"].items():
        for kind in alternatives(field):
            if "$ref" in kind:
                yield from numbers(SCHEMA["$defs"][kind["$ref"].rsplit("/", 1)[-1]], (*path, key))
            elif kind.get("type") == "array" and "$ref" in kind["items"]:
                yield from numbers(SCHEMA["$defs"][kind["items"]["$ref"].rsplit("/", 1)[-1]], (*path, key, "0"))
            elif kind.get("type") in ("integer", "number"):
                yield ".".join((*path, key)), kind


def alternatives(field):
    return field.get("anyOf") or field.get("oneOf") or [field]


NUMBERS = dict(numbers())
SINGLE = {key: kind for key, kind in NUMBERS.items() if ".0." not in key and not key.startswith("task.")}


def refusal(setting):
    with pytest.raises(ConfigError) as raised:
        load_config([], [setting])
    return str(raised.value)


def greatest(kind):
    return next(kind[name] for name in GREATEST if name in kind)


def test_every_number_has_a_least_and_a_greatest_value():
    assert len(NUMBERS) > 100
    unbounded = [key for key, kind in NUMBERS.items() for limits in (LEAST, GREATEST) if not set(limits) & set(kind)]
    assert unbounded == []


def test_what_is_beyond_the_greatest_value_is_refused_by_name():
    for key, kind in SINGLE.items():
        beyond = 2 * greatest(kind) + 1
        assert refusal(f"{key}={int(beyond) if kind['type'] == 'integer' else float(beyond)!r}").startswith(f"{key} = ")


def test_no_number_may_be_infinite_or_none():
    for key in SINGLE:
        for value in ("inf", "-inf", "nan"):
            assert key in refusal(f"{key}={value}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("key", [key for key in SINGLE if key.split(".")[0] in PLANNED])
def test_a_plan_is_made_at_the_greatest_value_of_everything_that_it_is_made_from(key):
    value = greatest(SINGLE[key])
    settings = [*COMPANIONS.get(key, ()), f"{key}={int(value) if SINGLE[key]['type'] == 'integer' else float(value)!r}"]
    plan = make_plan(load_config([], settings))
    assert 0 < plan.simulated.utilisation < 1.001 and math.isfinite(plan.duration_s)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (("batch.groups=65536", "batch.members=4096"), ("batch.groups = 65536", "batch.members = 4096", "268435456")),
        (
            ("evaluation.prompts=65536", "evaluation.samples=4096", "evaluation.temperature=1.0"),
            ("evaluation.prompts = 65536", "evaluation.samples = 4096", "268435456"),
        ),
    ],
)
def test_numbers_that_are_too_much_together_are_refused_with_both(settings, parts):
    with pytest.raises(ConfigError) as raised:
        load_config([], settings)
    assert [part for part in parts if part not in str(raised.value)] == []


def test_a_number_of_thousands_of_digits_is_refused_like_any_other(tmp_path):
    number = "1" + "0" * 5000
    assert refusal(f"run.steps={number}").startswith("run.steps = ")
    file = tmp_path / "run.toml"
    file.write_text(f"[run]\nsteps = {number}\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config([file])
