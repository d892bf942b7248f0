"""Whether adapters can be trained here."""

from __future__ import annotations

from echo2.config_learner import LoraSection
from echo2.errors import ConfigError
from echo2.packages import missing_packages


def check_adapters(settings: LoraSection) -> None:
    """Raises ConfigError if adapters are asked for and what makes them is not installed; needs no torch."""
    if settings.rank and missing_packages(["peft"]):
        raise ConfigError(f"learner.lora.rank = {settings.rank} needs peft, which is not installed: pip install '.[lora]'")
