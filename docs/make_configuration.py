"""Writes docs/configuration.md from the models in echo2/config_*.py: `python docs/make_configuration.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from echo2.config import Config
from echo2.config_base import MOST_ROLLOUTS
from echo2.run_directory import FIXED_SECTIONS

TARGET = Path(__file__).with_name("configuration.md")
KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "table",
    "array": "tables",
}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

HEAD = f"""# Configuration

This page is made from the sections in `echo2/config_sections.py` and the modules beside it by
`python docs/make_configuration.py`; edit the docstrings there.

A run is made from TOML files, read left to right, and `section.key=value` overrides, which win over every file. Keys that
are not on this page are refused. `echo2 train --dry-run` prints the resolved configuration, every key included.

What a configuration alone cannot tell is looked at before anything is made, and by `--dry-run`; all that is wrong is told at
once, with exit code 2:

- folders that cannot be made or written: `run.directory`, `learner.checkpoints`, `model.cache_directory` and
  `worker.spool_directory`;
- a `model.path` that is no whole model folder, has another alphabet than the task, or fewer positions than a completion needs;
- a task that cannot be imported or made, or has too few prompts; a `learner.best_metric` that no step will have;
- `hub.port` and `dissemination.port` that are taken, or one and the same;
- packages that the learner, a tracker, adapters or a bucket need; credentials for buckets and trackers;
- a `fleet.python` that is no Python, cannot import echo2, lacks what `worker.engine` needs, or does not have `worker.device`;
- a `learner.device`, or as many `learner.devices`, as are not there; an `activation.catalog` that is none.

A dry run ends with what it did not look at. It does not import torch, unless a device is named or there are several.

Sections are checked together too:

- κ ≤ S + 1, else no snapshot is fresh enough for every step;
- `dissemination.retain_snapshots` ≥ S + κ, else a snapshot in use would be deleted;
- `evaluation.every_steps` is a multiple of κ, else some versions that are due are never published;
- `evaluation.samples` = 1 where `evaluation.temperature` is 0, since greedy completions are all the same;
- `batch.members` ≥ 2 where `batch.drop_zero_variance` is true, since one member has no variance;
- `batch.groups` · `batch.members` and `evaluation.prompts` · `evaluation.samples` ≤ {MOST_ROLLOUTS:,}, since all of these
  completions are in memory together;
- `hub.heartbeat_timeout_s` ≥ 3 · `worker.heartbeat_interval_s`;
- `objective.loss_type = "gspo"` only with `objective.loss_agg_mode = "seq_mean_token_mean"`;
- `objective.importance_sampling_mode` other than `"off"` with `objective.loss_type = "decoupled_ppo"`, and with no other;
- `objective.clip_ratio_c` is 0 or exceeds 1 + `objective.clip_ratio_high`, and is 0 with `"cispo"`;
- `objective.overlong_buffer_tokens` ≤ `sampling.max_completion_tokens` where `objective.overlong = "soft"`.

A run that is resumed keeps {", ".join(f"`[{name}]`" for name in FIXED_SECTIONS)} and `run.seed`; all else may change.
"""


def render() -> str:
    """The whole page."""
    schema = Config.model_json_schema()
    parts = [HEAD]
    for name, section in schema["properties"].items():
        references = section.get("oneOf", [section])
        models = [schema["$defs"][_referred(reference)] for reference in references]
        if len(models) > 1:
            parts.append(f"## [{name}]\n\nOne of {len(models)} kinds, chosen by `type`.\n")
        parts += [_section(name, model, nested=len(models) > 1) for model in models]
        for key, field in models[0]["properties"].items():
            if "$ref" in field:
                parts.append(_section(f"{name}.{key}", schema["$defs"][_referred(field)], nested=False))
            elif "$ref" in field.get("items", {}):
                parts.append(_table(f"[[{name}.{key}]]", schema["$defs"][_referred(field["items"])]))
    return "\n".join(parts)


def _referred(reference: Mapping[str, Any]) -> str:
    return reference["$ref"].rsplit("/", 1)[-1]


def _section(name: str, model: Mapping[str, Any], nested: bool) -> str:
    title = f'### [{name}] type = "{model["properties"]["type"]["const"]}"' if nested else f"## [{name}]"
    return _described(title, model)


def _table(name: str, model: Mapping[str, Any]) -> str:
    return _described(f"### {name}", model)


def _described(title: str, model: Mapping[str, Any]) -> str:
    rows = "\n".join("| " + " | ".join(row) + " |" for row in _rows(model["properties"]))
    return f"{title}\n\n{model['description']}\n\n| key | value | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _rows(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, field in fields.items():
        if "$ref" in field:
            continue
        default = _default(field)
        yield f"`{name}`", _values(field), default, field["description"].replace("\n", " ").replace("|", "\\|")


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field:
        return "to be given"
    return "left out" if field["default"] is None else f"`{_toml(field['default'])}`"


def _values(field: Mapping[str, Any]) -> str:
    """What a field may be, in words."""
    if "anyOf" in field:
        return _values(next(kind for kind in field["anyOf"] if kind["type"] != "null"))
    if "const" in field:
        return f"`{_toml(field['const'])}`"
    if "enum" in field:
        return " or ".join(f"`{_toml(value)}`" for value in field["enum"])
    if field.get("format") == "path":
        return "path"
    if field["type"] == "array" and "type" in field["items"]:
        return f"list of {KINDS[field['items']['type']]}"
    limits = [f"{sign} {field[limit]:.12g}" for limit, sign in LIMITS.items() if limit in field]
    pattern = [f"matching `{field['pattern']}`".replace("|", "\\|")] if "pattern" in field else []
    return " ".join([KINDS[field["type"]], ", ".join(limits), *pattern]).replace("  ", " ").strip()


def _toml(value: object) -> str:
    return tomli_w.dumps({"value": value}).split("=", 1)[1].strip() if value != {} else "{}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
