"""Which packages are installed here, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable


def missing_packages(names: Iterable[str]) -> list[str]:
    """Those of the top-level packages `names` that cannot be imported here, in their order."""
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # A folder of that name in the working directory is found too, without an origin.
    return spec is not None and spec.origin is not None
