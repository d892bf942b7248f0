"""How learner and workers speak to the hub.

Invariants: every request has a time-out; a hub that is away is waited for with jittered pauses up to `patience_s`, and every
request may be repeated without harm; a refusal is raised as UserError with the hub's own sentence; a request under way when its
caller closes ends with HubUnavailable, of which nobody is warned.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import tenacity
from pydantic import ValidationError

from echo2.dissemination.broadcast.record import RECORD, BroadcastRecord
from echo2.dissemination.manifest import Manifest, SnapshotWithdrawn, parse_manifest, parse_route
from echo2.errors import DiskError, NameTaken, UserError, WaitTimeout
from echo2.protocol import (
    Batch,
    CrewMember,
    GroupRollouts,
    LeaseAnswer,
    LogProbDifference,
    Telemetry,
    WorkerWelcome,
    decode_batch,
    encode_groups,
)

log = logging.getLogger(__name__)
MAX_PAUSE_S = 2.0
WARNING_PAUSE_S = 60.0
"""Between two warnings that the hub is away."""
POLL_S = 20.0
LONGEST_REASON = 500
"""Characters of what a worker gives as its reason to leave."""
LEARNER_POLL_S = 1.0
"""Of waits in which the learner looks whether it is to go on."""


def _may_pass(error: BaseException) -> bool:
    """Whether another try may go better: not where the request itself cannot be sent."""
    unsendable = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
    return isinstance(error, httpx.TransportError) and not isinstance(error, unsendable)


def _checked_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        possible = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        possible = False
    if not possible:
        raise UserError(f"hub address {url!r} is not of the form http://HOST:PORT")
    return url.rstrip("/")


def _check_token(url: str, token: str) -> None:
    # Said here since httpx notices most of these only when it sends, as if the hub were to blame.
    if not token or not token.isascii() or not token.isprintable() or token != token.strip():
        raise _unsendable(url, "a token is one line of ASCII characters, without blanks around it")


def _unsendable(url: str, reason: str) -> UserError:
    return UserError(f"hub address {url!r} or its token cannot be sent ({reason}): check both")


class HubUnavailable(WaitTimeout):
    """The hub did not answer for as long as the caller was willing to wait."""


class HubDiskError(HubUnavailable, DiskError):
    """The hub's disk does not take what it was told: it can be told again once there is room."""


REFUSALS: dict[int, type[UserError]] = {410: SnapshotWithdrawn, 423: NameTaken, 507: HubDiskError}
"""What the hub's status says of why it refuses; any other is a UserError."""


class HubClient:
    """One caller's connection to the hub; may be used by several threads."""

    def __init__(self, url: str, token: str, request_timeout_s: float = 30.0, patience_s: float = 60.0) -> None:
        """`patience_s` bounds how long an absent hub is waited for before HubUnavailable; both times may be changed later.

        Raises UserError where address or token cannot be sent.
        """
        self.url = _checked_address(url)
        _check_token(url, token)
        self.patience_s = patience_s
        self.request_timeout_s = request_timeout_s
        self._process = secrets.token_hex(8)
        self._last_contact = time.monotonic()
        self._away_since: float | None = None
        self._warned: float | None = None
        self._warning = threading.Lock()
        self._closed = threading.Event()
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=request_timeout_s,
                limits=httpx.Limits(max_connections=32, max_keepalive_connections=32, keepalive_expiry=60.0),
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise _unsendable(url, str(error)) from None

    @property
    def silence_s(self) -> float:
        """Seconds since the hub last answered anything."""
        return time.monotonic() - self._last_contact

    def warn(self, error: HubUnavailable) -> None:
        """Log that the hub is away, but seldom, however many threads notice however often; not once this is closed."""
        with self._warning:
            recent = self._warned is not None and time.monotonic() - self._warned < WARNING_PAUSE_S
            if recent or self._closed.is_set():
                return
            self._warned = time.monotonic()
        log.warning("%s", error)

    def close(self) -> None:
        self._closed.set()
        self._http.close()

    # --- workers

    def register(self, name: str) -> WorkerWelcome:
        """Become the worker called `name`. Raises NameTaken if this caller was it before and another one is now."""
        try:
            return WorkerWelcome.model_validate(self._json("POST", "/v1/workers", {"name": name, "process": self._process}))
        except ValidationError:
            raise UserError(f"{self.url} does not answer like the hub of an ECHO-2 run: check --hub and the versions") from None

    def heartbeat(self, worker_id: str, telemetry: Telemetry) -> None:
        self._json("POST", f"/v1/workers/{worker_id}/heartbeat", telemetry.model_dump())

    def loaded(self, worker_id: str, telemetry: Telemetry) -> None:
        self._json("POST", f"/v1/workers/{worker_id}/loaded", telemetry.model_dump())

    def lease(self, worker_id: str, limit: int, wait_s: float) -> LeaseAnswer:
        answer = self._json("POST", f"/v1/workers/{worker_id}/leases", {"limit": limit, "wait_s": wait_s}, wait_s)
        return LeaseAnswer.model_validate(answer)

    def post(self, worker_id: str, groups: Sequence[GroupRollouts]) -> list[str | UserError]:
        """Hand in groups; for each the hub's verdict once it is durable, or why the hub refuses it."""
        answer = self._request("POST", f"/v1/workers/{worker_id}/rollouts", content=encode_groups(groups)).json()
        return [verdict.get("outcome") or UserError(verdict["error"]) for verdict in answer["verdicts"]]

    def return_leases(self, worker_id: str, group_ids: Sequence[int]) -> None:
        self._json("POST", f"/v1/workers/{worker_id}/returns", {"group_ids": list(group_ids)})

    def leave(self, worker_id: str, reason: str = "") -> None:
        """Say goodbye, with the reason where the worker cannot go on."""
        self._request("DELETE", f"/v1/workers/{worker_id}", params={"reason": reason[:LONGEST_REASON]})

    def model_file(self, name: str) -> bytes:
        return self._request("GET", f"/v1/model/{name}").content

    # --- snapshots

    def snapshot_route(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        """What to fetch, in order, to go from the snapshot called `held_id` to the newest; empty after `wait_s` without one."""
        parameters: dict[str, Any] = {"wait_s": wait_s} | ({"held": held_id} if held_id else {})
        return parse_route(self._request("GET", "/v1/snapshots/newest", params=parameters, extra_s=wait_s).content)

    def stream_snapshot(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        """The bytes of `count` chunks as they arrive. Raises HubUnavailable when the stream breaks; it is not repeated here."""
        yield from self._stream(f"/v1/snapshots/{manifest.version}/{manifest.payload_digest}/chunks", first_chunk, count)

    def base(self) -> Manifest:
        """What describes the weights that the run's adapters belong to."""
        return parse_manifest(self._request("GET", "/v1/base").content)

    def stream_base(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        """The bytes of `count` of its chunks, as `stream_snapshot` gives those of a snapshot."""
        yield from self._stream(f"/v1/base/{manifest.payload_digest}/chunks", first_chunk, count)

    def _stream(self, path: str, first_chunk: int, count: int) -> Iterator[bytes]:
        try:
            with self._while_open(), self._http.stream("GET", path, params={"first": first_chunk, "count": count}) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self._raise_refusal(answer)
                self._last_contact = time.monotonic()
                yield from answer.iter_bytes()
        except httpx.TransportError as error:
            raise HubUnavailable(f"hub {self.url}: the stream of {path} broke ({error!r})") from None

    def announce(self, version: int) -> str:
        return self._json("POST", f"/v1/snapshots/{version}/announce")["snapshot_id"]

    def broadcast_record(self, version: int) -> BroadcastRecord | None:
        """What the broadcast of `version` was like so far; None where there was none, or long ago."""
        answer = self._request("GET", f"/v1/snapshots/{version}/broadcast")
        return RECORD.validate_json(answer.content) if answer.status_code == 200 else None

    def await_receivers(
        self, version: int, timeout_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> tuple[list[str], list[str]]:
        """Wait until all live workers generate with `version`; returns who does and, after `timeout_s`, who does not."""
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = max(0.0, min(LEARNER_POLL_S, deadline - time.monotonic()))
            answer = self._request(
                "GET", f"/v1/snapshots/{version}/receivers", params={"wait_s": wait_s}, extra_s=wait_s
            ).json()
            if not answer["waiting"] or time.monotonic() >= deadline or given_up():
                return answer["loaded"], answer["waiting"]

    # --- learner

    def take_batch(self, step: int, keep_waiting: Callable[[], None] = lambda: None) -> Batch:
        """The batch for `step`, once it is full; `keep_waiting` is called between long-polls and may raise to end the wait."""
        while True:
            answer = self._request("GET", f"/v1/batches/{step}", params={"wait_s": LEARNER_POLL_S}, extra_s=LEARNER_POLL_S)
            if answer.status_code == 200:
                return decode_batch(answer.content)
            keep_waiting()

    def commit(
        self,
        step: int,
        metrics: Mapping[str, float],
        oldest_checkpoint: int,
        differences: Sequence[LogProbDifference] = (),
    ) -> list[str]:
        """Step `step` is done; returns what is to be told of the workers that `differences` speak against."""
        done = {
            "metrics": dict(metrics),
            "oldest_checkpoint": oldest_checkpoint,
            "differences": [difference.model_dump() for difference in differences],
        }
        return self._json("POST", f"/v1/steps/{step}", done)["warnings"]

    def take_evaluation(self, version: int, keep_waiting: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The figures of the evaluation of `version`, once it ends; `keep_waiting` as with `take_batch`."""
        while True:
            answer = self._request(
                "GET", f"/v1/evaluations/{version}", params={"wait_s": LEARNER_POLL_S}, extra_s=LEARNER_POLL_S
            )
            if answer.status_code == 200:
                return answer.json()
            keep_waiting()

    def resume(self, version: int) -> int:
        return self._json("POST", "/v1/resume", {"version": version})["replayed_steps"]

    def open_interval(self, name: str, offer: str, price_usd_per_hour: float) -> None:
        self._json("POST", "/v1/paid-intervals", {"name": name, "offer": offer, "price_usd_per_hour": price_usd_per_hour})

    def close_interval(self, name: str) -> None:
        self._request("DELETE", f"/v1/paid-intervals/{name}")

    def record_interval(
        self, name: str, offer: str, price_usd_per_hour: float, launched_at_s: float, ended_at_s: float | None
    ) -> None:
        """What the cloud says of a machine that is or was paid for."""
        rented = {"offer": offer, "price_usd_per_hour": price_usd_per_hour, "launched_at_s": launched_at_s}
        self._json("PUT", f"/v1/paid-intervals/{name}", rented | {"ended_at_s": ended_at_s})

    def crew(self) -> list[CrewMember]:
        """Every name under which a worker registered, as the last one of that name stands."""
        return [CrewMember.model_validate(member) for member in self._json("GET", "/v1/crew")["crew"]]

    def drain(self, machine: str) -> None:
        """The machine's workers are to finish what they hold and leave."""
        self._json("POST", f"/v1/machines/{machine}/drain")

    def cost_usd(self) -> float:
        """Rent of all paid intervals, the open ones up to now."""
        return self._request("GET", "/v1/paid-intervals").json()["cost_usd"]

    def note(self, kind: str, subject: str, detail: str) -> None:
        self._json("POST", "/v1/events", {"kind": kind, "subject": subject, "detail": detail})

    def fleet_ending(self, since_s: float) -> str:
        """Why the fleet of rented machines ended before the run; empty where it did not, since this time of the epoch."""
        return self._request("GET", "/v1/fleet-ending", params={"since_s": since_s}).json()["reason"]

    # --- overview

    def live_workers(self) -> list[str]:
        return self._request("GET", "/v1/workers").json()["worker_ids"]

    def status(self) -> dict[str, Any]:
        return self._request("GET", "/v1/status").json()

    def steps(self) -> list[dict[str, float]]:
        return self._request("GET", "/v1/steps").json()["steps"]

    def health(self) -> dict[str, Any]:
        return self._request("GET", "/health").json()

    # --- transport

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None, extra_s: float = 0.0) -> dict[str, Any]:
        answer = self._request(method, path, json=body, extra_s=extra_s)
        try:
            return answer.json()
        except ValueError:
            raise UserError(f"what {self.url} answers to {path} is not JSON: is it the hub of an ECHO-2 run?") from None

    def _request(self, method: str, path: str, extra_s: float = 0.0, **arguments: Any) -> httpx.Response:
        """Send until answered; `extra_s` is the time that the hub was asked to wait before it answers."""
        began = time.monotonic()
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=MAX_PAUSE_S),
            stop=tenacity.stop_after_delay(self.patience_s),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        try:
            answer = attempts(self._attempt, method, path, timeout=self.request_timeout_s + extra_s, **arguments)
        except httpx.TransportError as error:
            raise self._unavailable(began, error) from None
        self._last_contact, self._away_since = time.monotonic(), None
        if not 200 <= answer.status_code < 300:
            self._raise_refusal(answer)
        return answer

    def _attempt(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        with self._while_open():
            return self._http.request(method, path, **arguments)

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Raises HubUnavailable if this is closed, or is closed before the request in the block is sent."""
        closed = HubUnavailable(f"the connection to hub {self.url} was closed by its own side")
        if self._closed.is_set():
            raise closed
        try:
            yield
        except RuntimeError:
            # What httpx raises of a client that another thread has closed meanwhile.
            if self._closed.is_set():
                raise closed from None
            raise

    def _unavailable(self, began: float, error: httpx.TransportError) -> HubUnavailable:
        """What to say of a request that began then and was not answered: for how long the hub has answered nothing."""
        if self._away_since is None:
            self._away_since = max(began, self._last_contact)
        away_s = time.monotonic() - self._away_since
        told = f" for {away_s:.0f} s" if away_s >= 1 else ""
        return HubUnavailable(f"hub {self.url} did not answer{told} ({error!r}): is it running?")

    def _raise_refusal(self, answer: httpx.Response) -> None:
        try:
            sentence = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            sentence = "without a reason; is it the hub of an ECHO-2 run?"
        kind = REFUSALS.get(answer.status_code, UserError)
        raise kind(f"hub {self.url} refused {answer.request.url.path} ({answer.status_code}): {sentence}")
