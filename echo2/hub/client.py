"""How learner and workers speak to the hub.

Invariants: every request has a time-out; a hub that is away is waited for with jittered pauses up to `patience_s`, and every
request may be repeated without harm; a refusal is raised as UserError with the hub's own sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import tenacity
from pydantic import ValidationError

from echo2.dissemination.broadcast.record import RECORD, BroadcastRecord
from echo2.dissemination.manifest import Manifest, SnapshotWithdrawn, parse_manifest, parse_route
from echo2.errors import UserError, WaitTimeout
from echo2.protocol import Batch, GroupRollouts, LeaseAnswer, Telemetry, WorkerWelcome, decode_batch, encode_group

MAX_PAUSE_S = 2.0
POLL_S = 20.0
BATCH_POLL_S = 1.0


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


class HubUnavailable(WaitTimeout):
    """The hub did not answer for as long as the caller was willing to wait."""


class HubClient:
    """One caller's connection to the hub; may be used by several threads."""

    def __init__(self, url: str, token: str, request_timeout_s: float = 30.0, patience_s: float = 60.0) -> None:
        """`patience_s` bounds how long an absent hub is waited for before HubUnavailable; both times may be changed later."""
        self.url = _checked_address(url)
        self.patience_s = patience_s
        self.request_timeout_s = request_timeout_s
        self._last_contact = time.monotonic()
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=request_timeout_s,
                limits=httpx.Limits(max_connections=32, max_keepalive_connections=32, keepalive_expiry=60.0),
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise UserError(f"hub address {url!r} or its token cannot be sent ({error}): check both") from None

    @property
    def silence_s(self) -> float:
        """Seconds since the hub last answered anything."""
        return time.monotonic() - self._last_contact

    def close(self) -> None:
        self._http.close()

    # --- workers

    def register(self, name: str) -> WorkerWelcome:
        try:
            return WorkerWelcome.model_validate(self._json("POST", "/v1/workers", {"name": name}))
        except ValidationError:
            raise UserError(f"{self.url} does not answer like the hub of an ECHO-2 run: check --hub and the versions") from None

    def heartbeat(self, worker_id: str, telemetry: Telemetry) -> None:
        self._json("POST", f"/v1/workers/{worker_id}/heartbeat", telemetry.model_dump())

    def loaded(self, worker_id: str, telemetry: Telemetry) -> None:
        self._json("POST", f"/v1/workers/{worker_id}/loaded", telemetry.model_dump())

    def lease(self, worker_id: str, limit: int, wait_s: float) -> LeaseAnswer:
        answer = self._json("POST", f"/v1/workers/{worker_id}/leases", {"limit": limit, "wait_s": wait_s}, wait_s)
        return LeaseAnswer.model_validate(answer)

    def post(self, worker_id: str, group: GroupRollouts) -> str:
        """Hand in a group; returns the hub's verdict once it is durable."""
        return self._request("POST", f"/v1/workers/{worker_id}/rollouts", content=encode_group(group)).json()["outcome"]

    def return_leases(self, worker_id: str, group_ids: Sequence[int]) -> None:
        self._json("POST", f"/v1/workers/{worker_id}/returns", {"group_ids": list(group_ids)})

    def leave(self, worker_id: str) -> None:
        self._request("DELETE", f"/v1/workers/{worker_id}")

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
            with self._http.stream("GET", path, params={"first": first_chunk, "count": count}) as answer:
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

    def await_receivers(self, version: int, timeout_s: float) -> tuple[list[str], list[str]]:
        """Wait until all live workers generate with `version`; returns who does and, after `timeout_s`, who does not."""
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
            answer = self._request(
                "GET", f"/v1/snapshots/{version}/receivers", params={"wait_s": wait_s}, extra_s=wait_s
            ).json()
            if not answer["waiting"] or time.monotonic() >= deadline:
                return answer["loaded"], answer["waiting"]

    # --- learner

    def take_batch(self, step: int, keep_waiting: Callable[[], None] = lambda: None) -> Batch:
        """The batch for `step`, once it is full; `keep_waiting` is called between long-polls and may raise to end the wait."""
        while True:
            answer = self._request("GET", f"/v1/batches/{step}", params={"wait_s": BATCH_POLL_S}, extra_s=BATCH_POLL_S)
            if answer.status_code == 200:
                return decode_batch(answer.content)
            keep_waiting()

    def commit(self, step: int, metrics: Mapping[str, float], oldest_checkpoint: int) -> None:
        self._json("POST", f"/v1/steps/{step}", {"metrics": dict(metrics), "oldest_checkpoint": oldest_checkpoint})

    def resume(self, version: int) -> int:
        return self._json("POST", "/v1/resume", {"version": version})["replayed_steps"]

    def open_interval(self, name: str, offer: str, price_usd_per_hour: float) -> None:
        self._json("POST", "/v1/paid-intervals", {"name": name, "offer": offer, "price_usd_per_hour": price_usd_per_hour})

    def close_interval(self, name: str) -> None:
        self._request("DELETE", f"/v1/paid-intervals/{name}")

    def note(self, kind: str, subject: str, detail: str) -> None:
        self._json("POST", "/v1/events", {"kind": kind, "subject": subject, "detail": detail})

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
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=MAX_PAUSE_S),
            stop=tenacity.stop_after_delay(self.patience_s),
            reraise=True,
        )
        try:
            answer = attempts(self._http.request, method, path, timeout=self.request_timeout_s + extra_s, **arguments)
        except httpx.TransportError as error:
            raise HubUnavailable(
                f"hub {self.url} did not answer for {self.patience_s:g} s ({error!r}): is it running?"
            ) from None
        self._last_contact = time.monotonic()
        if not 200 <= answer.status_code < 300:
            self._raise_refusal(answer)
        return answer

    def _raise_refusal(self, answer: httpx.Response) -> None:
        try:
            sentence = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            sentence = "without a reason; is it the hub of an ECHO-2 run?"
        kind = SnapshotWithdrawn if answer.status_code == 410 else UserError
        raise kind(f"hub {self.url} refused {answer.request.url.path} ({answer.status_code}): {sentence}")
