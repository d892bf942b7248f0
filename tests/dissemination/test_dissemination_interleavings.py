"""Whatever befalls a run's dissemination, in whatever order: every worker that is left has the newest version, and no other.

Each example is a random interleaving of what the learner, the hub and the workers do, over real sockets.
"""

from __future__ import annotations

import random
import time

import pytest
from interleavings import WEIGHTS, Adversary, Hub, Worker, in_loop, reset

from echo2.dissemination.broadcast.wire import worker_number

EXAMPLES = 16
DEADLINE_S = 20.0
CHANGED = 3000
MOST_WORKERS = 6
BLOCKED_S = 2.0
GRAVE = {"corrupt", "replayed", "withheld", "malformed"}
"""What no honest worker is ever said to have done."""

SHARES = {
    "publish_a_delta": 5.0,
    "publish_in_full": 1.5,
    "publish_after_a_gap": 1.0,
    "publish_at_once": 1.0,
    "resume_the_learner": 0.5,
    "restart_the_hub": 1.0,
    "join": 2.0,
    "join_again": 1.0,
    "leave": 1.0,
    "kill": 1.0,
    "break_between_workers": 2.0,
    "break_to_the_hub": 2.0,
    "corrupt": 1.5,
    "sleep": 1.5,
    "wake": 1.0,
    "block": 0.4,
    "pause": 2.0,
}
"""How often each step is taken, relative to the others."""


class Story:
    """A run to which one thing happens after the other; `steps` says what."""

    def __init__(self, folder, seed):
        self.random = random.Random(seed)
        self.steps, self.adversaries = [], []
        self.hub = Hub(folder)
        self.workers, self.gone = [], []
        self.cuts = 0
        """Connections that broke or were closed."""
        self.stalls = self.resumes = 0
        for _ in range(3):
            self.join()
        self.publish_a_delta()

    def step(self):
        name = self.random.choices(list(SHARES), list(SHARES.values()))[0]
        self.steps.append(name)
        getattr(self, name)()
        time.sleep(0.1 * self.random.random())

    # --- the learner and its hub

    def publish_a_delta(self):
        self.hub.publish(CHANGED)

    def publish_in_full(self):
        self.hub.publish(3 * WEIGHTS)

    def publish_after_a_gap(self):
        self.hub.publish(CHANGED, gap=self.random.randint(2, 4))

    def publish_at_once(self):
        for _ in range(self.random.randint(2, 4)):
            self.hub.publish(CHANGED)

    def resume_the_learner(self):
        self.resumes += 1
        self.hub.resume(self.random.randint(0, 2))

    def restart_the_hub(self):
        self.cuts += len(self.hub.links)
        self.hub.restart(self.random.choice([0.0, 0.05, 0.5]))

    # --- the workers

    def join(self, name=None):
        if len(self.workers) < MOST_WORKERS:
            name = name or f"w{len(self.workers) + len(self.gone)}"
            self.workers.append(Worker(self.hub, name, serving=self.random.random() < 0.8))

    def join_again(self):
        """A new process of a worker that was there before."""
        away = sorted({worker.name for worker in self.gone} - {worker.name for worker in self.workers})
        if away:
            self.join(self.random.choice(away))

    def leave(self):
        if len(self.workers) > 1:
            self._part().leave()

    def kill(self):
        if len(self.workers) > 1:
            self._part().kill()

    def break_between_workers(self):
        peer = self.random.choice(self.workers).peer
        self._cut(peer, list(peer._links.values()))

    def break_to_the_hub(self):
        self._cut(self.hub.source, self.hub.links)

    def corrupt(self):
        worker = self.random.choice(self.workers)
        if len(self.adversaries) < 2 and worker.name not in {adversary.name for adversary in self.adversaries}:
            way = self.random.choice(Adversary.WAYS)
            self.adversaries.append(Adversary(worker, way, self.random.random()))
            self.stalls += way == "trickle"
            self.steps[-1] = f"let {worker.name} {way}"

    def sleep(self):
        """A worker learns of no version for a while, and holds an old one then."""
        self.random.choice(self.workers).awake.clear()

    def wake(self):
        for worker in self.workers:
            worker.awake.set()

    def block(self):
        self.stalls += 1
        self.random.choice(self.workers).block(BLOCKED_S)

    def pause(self):
        time.sleep(0.3 * self.random.random())

    # --- and in the end

    def settle(self):
        """Wait until everybody who is left has the newest version."""
        self.wake()
        newest, end_s = self.hub.newest, time.monotonic() + DEADLINE_S
        while late := [worker for worker in self.workers if not worker.has(newest)]:
            if time.monotonic() > end_s:
                told = ", ".join(f"{w.name} with {[m.version for m in w.told[-3:]]}: {w.follower.last_error}" for w in late)
                raise AssertionError(f"version {newest.version} was not everywhere within {DEADLINE_S:g} s: {told}")
            time.sleep(0.01)

    def check(self):
        everybody = [*self.workers, *self.gone]
        for thread in [self.hub.source, *(worker.peer for worker in everybody)]:
            thread.raise_if_failed()
        assert [wrong for worker in everybody for wrong in worker.wrong] == []
        assert [worker.name for worker in everybody if worker.follower.rejected] == []
        most = 1 + self.resumes
        assert [worker.name for worker in everybody if any(times > most for times in worker.streams.values())] == []
        accused = {(event.culprit, event.kind) for event in self.hub.events if event.kind in GRAVE}
        honest = {(name, kind) for name, kind in accused if name not in {adversary.name for adversary in self.adversaries}}
        assert honest == set()
        for adversary in self.adversaries:
            if any(worker_number(adversary.name) in worker.peer._distrusted for worker in self.workers):
                assert (adversary.name, "corrupt") in accused, f"{adversary.name} was not named"
                self.cuts += 1
        if not self.stalls:
            twice_bytes = sum(worker.peer.duplicate_bytes for worker in everybody)
            assert twice_bytes <= self.cuts * 5000, f"{twice_bytes} bytes came twice after {self.cuts} breaks"

    def stop(self):
        for worker in self.workers:
            worker.leave()
        self.hub.stop()

    def _part(self):
        worker = self.workers.pop(self.random.randrange(len(self.workers)))
        self.gone.append(worker)
        self.cuts += worker.peer.peers + 1
        return worker

    def _cut(self, thread, links):
        if links:
            self.cuts += 1
            in_loop(thread, lambda: reset(self.random.choice(links)))


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_everybody_who_is_left_has_the_newest_version_and_nobody_ever_had_wrong_weights(tmp_path, seed):
    story = Story(tmp_path, seed)
    try:
        for _ in range(story.random.randint(6, 16)):
            story.step()
        story.settle()
        story.check()
    finally:
        story.stop()
        print(f"seed {seed}:", *story.steps, sep="\n  ")
