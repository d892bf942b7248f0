"""A worker that says it generates with the newest version, but keeps the first weights that it was given.

python lying_worker.py HUB_URL NAME
"""

import os
import sys

from echo2.rollout.notice import Notice
from echo2.rollout.process import work
from echo2.rollout.transformers_engine import TransformersEngine


class StuckEngine(TransformersEngine):
    def load_weights(self, snapshot, version):
        if self.version is None:
            super().load_weights(snapshot, version)
        self.version = version


if __name__ == "__main__":
    from echo2.rollout import transformers_engine

    transformers_engine.TransformersEngine = StuckEngine
    work(sys.argv[1], os.environ["ECHO2_TOKEN"], sys.argv[2], [], None, Notice())
