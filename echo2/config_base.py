"""What every section of a configuration has in common: unknown keys and values of another type are refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
S3_LOCATION = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w./-]*)?"
"""A bucket and a prefix in it, `s3://BUCKET/PREFIX`; to be matched with `re.ASCII`."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)
