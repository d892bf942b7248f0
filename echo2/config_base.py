"""What every section of a configuration has in common: unknown keys and values of another type are refused.

Invariants: every number has a least and a greatest value, above which it is a slip or cannot work; none is infinite.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

MOST_STEPS = 10_000_000
MOST_TOKENS = 2**20
"""In one sequence."""
MOST_MEMBERS = 4096
MOST_ROLLOUTS = 2**20
"""Completions that one step, or one evaluation, may consist of: all are in memory together."""
MOST_BYTES_PER_S = 1e12
LEAST_TEMPERATURE = 1e-3
GREATEST_TEMPERATURE = 1e3

Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Bytes = Annotated[int, Field(ge=0, le=10**15)]
BytesPerS = Annotated[float, Field(ge=0.0, le=MOST_BYTES_PER_S)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e6)]
"""Systems wait for 2³¹ ms at most, 25 days; this ends at 11."""
Hours = Annotated[float, Field(ge=1e-3, le=1e6)]
Usd = Annotated[float, Field(ge=0.0, le=1e9)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
S3_LOCATION = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w./-]*)?"
"""A bucket and a prefix in it, `s3://BUCKET/PREFIX`; to be matched with `re.ASCII`."""


def _known_device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:[0-9]+)?", name, re.ASCII):
        raise PydanticCustomError("device", "should be auto, cpu, cuda or one of several such as cuda:1")
    return name


Device = Annotated[str, AfterValidator(_known_device)]
"""What torch calls a device, or `auto`."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)
