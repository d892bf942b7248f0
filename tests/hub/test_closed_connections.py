"""A connection that its own side closes while another thread uses it: one kind of error, and no learner's stage fails of it."""

import threading

import pytest

from echo2.hub.client import HubClient, HubUnavailable
from flows.dissemination import await_workers

FEW = ("batch.groups=2", "batch.members=2", "run.steps=6", "hub.heartbeat_timeout_s=600")


class ClosedMidway(HubClient):
    """Closes itself after it has found itself open, before the request is sent."""

    def __init__(self, url, token):
        super().__init__(url, token, patience_s=1.0)
        build = self._http.build_request

        def closing(*arguments, **named):
            self.close()
            return build(*arguments, **named)

        self._http.build_request = closing


class NoPublisher:
    def arrived(self, record):
        raise AssertionError("what comes after the end is of no use")


def test_a_request_that_its_own_side_cuts_off_before_it_is_sent_finds_no_hub(make_run, serve):
    run = make_run(*FEW)
    _, client = serve(run)
    for request in (lambda hub: hub.status(), lambda hub: list(hub._stream("/v1/base/0/chunks", 0, 1))):
        with pytest.raises(HubUnavailable, match="was closed by its own side"):
            request(ClosedMidway(client.url, run.token))


def test_who_waits_for_workers_when_all_is_over_asks_the_hub_no_more(make_run, serve):
    run = make_run(*FEW)
    _, client = serve(run)
    client.register("slow")
    over = threading.Event()
    over.set()
    assert await_workers.fn(0, NoPublisher(), client, 60.0, over) == 0
    client.close()
    assert await_workers.fn(0, NoPublisher(), client, 60.0, over) == 0
    over.clear()
    with pytest.raises(HubUnavailable):
        await_workers.fn(0, NoPublisher(), client, 60.0, over)
