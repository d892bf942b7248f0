"""The proof that an engine has a version's weights: what it gives for the version's probe is what the learner gave.

Invariant: an engine that fails takes no leases. In float32 this tells a version from the one before; in bfloat16 rounding is
larger than a step, so that it tells weights that were mixed up, left out or put in the wrong place, and that they are this very
version is what the snapshot's digest says.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from echo2.dissemination.manifest import Manifest
from echo2.errors import UserError
from echo2.rollout.engine import Engine

Dtype = Literal["float32", "bfloat16"]
LARGEST_DIFFERENCE: dict[Dtype, float] = {"float32": 5e-4, "bfloat16": 0.25}
"""Of log-probabilities, in nats, the mean of its absolute values over the probe's tokens."""


class WrongWeights(UserError):
    """An engine does not have the weights that it was given."""


def require_weights(engine: Engine, manifest: Manifest, dtype: Dtype) -> None:
    """Raises WrongWeights unless `engine` generates with the weights of `manifest`, as far as it can be asked."""
    if manifest.probe is None:
        return
    found = engine.prompt_log_probs(manifest.probe.token_ids)
    if found is None:
        return
    difference, largest = float(np.abs(found - np.array(manifest.probe.log_probs)).mean()), LARGEST_DIFFERENCE[dtype]
    if not difference <= largest:
        raise WrongWeights(
            f"the engine does not have the weights of version {manifest.version}: its log-probabilities of the probe are "
            f"{difference:.2g} nats from the learner's on average, over {largest:g}: choose another worker.engine for the model"
        )
