"""The hub over HTTP.

Invariants: every request but `/health` carries the run's token; a body larger than the configured limit is refused before it is
read; a refused request changes nothing. Errors that the caller can mend come back as `{"error": sentence}`.
"""

from __future__ import annotations

import hmac
import sqlite3
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from echo2.dissemination.broadcast.record import RECORD
from echo2.dissemination.manifest import SnapshotWithdrawn, encode_route
from echo2.dissemination.store import SnapshotStore
from echo2.errors import DiskError, NameTaken, UserError
from echo2.hub.metrics import render_metrics
from echo2.hub.service import Hub
from echo2.protocol import BodyError, LogProbDifference, Telemetry, decode_group, encode_batch, split_groups
from echo2.run_directory import RunDirectory

MAX_WAIT_S = 60.0
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json")
Wait = Annotated[float, Query(ge=0.0, le=MAX_WAIT_S)]


class Registration(BaseModel):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    process: str = Field(min_length=1, max_length=64)


class LeaseRequest(BaseModel):
    limit: int = Field(ge=1, le=4096)
    wait_s: float = Field(ge=0.0, le=MAX_WAIT_S)


class LeaseReturn(BaseModel):
    group_ids: list[int]


class StepCommit(BaseModel):
    metrics: dict[str, float]
    oldest_checkpoint: int = Field(ge=0)
    differences: list[LogProbDifference] = []


class ResumeRequest(BaseModel):
    version: int = Field(ge=0)


class PaidInterval(BaseModel):
    name: str
    offer: str
    price_usd_per_hour: float = Field(ge=0.0)


class RentedInterval(BaseModel):
    offer: str
    price_usd_per_hour: float = Field(ge=0.0)
    launched_at_s: float
    ended_at_s: float | None = None


class Event(BaseModel):
    kind: str
    subject: str
    detail: str


def create_app(run: RunDirectory) -> FastAPI:
    """The application that serves `run`; who serves it puts the run's hub into `state.hub`, and starts and stops it."""
    app = FastAPI(title="ECHO-2 hub", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=run.token, max_body_bytes=run.config.hub.max_body_bytes)
    _explain_errors(app)
    _add_worker_routes(app, run)
    _add_snapshot_routes(app, run)
    _add_learner_routes(app)
    _add_fleet_routes(app)
    _add_overview_routes(app, run)
    return app


class Guard:
    """Refuses, before any of the body is read, what carries no token or announces no acceptable length."""

    def __init__(self, app: ASGIApp, token: str, max_body_bytes: int) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        if scope["path"] != "/health" and not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return _refusal(
                401, "the request does not carry this run's token: set ECHO2_TOKEN to what the run's file `token` holds"
            )
        if b"transfer-encoding" in headers:
            return _refusal(411, "the request does not say how long its body is: send Content-Length")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return _refusal(
                413,
                f"the body is not of 0 to hub.max_body_bytes = {self._max_body_bytes} bytes: send less",
            )
        return None


def _explain_errors(app: FastAPI) -> None:
    @app.exception_handler(SnapshotWithdrawn)
    async def withdrawn(request: Request, error: SnapshotWithdrawn) -> Response:
        return _refusal(410, str(error))

    @app.exception_handler(BodyError)
    async def bad_body(request: Request, error: BodyError) -> Response:
        return _refusal(422, str(error))

    @app.exception_handler(NameTaken)
    async def name_taken(request: Request, error: NameTaken) -> Response:
        return _refusal(423, str(error))

    @app.exception_handler(DiskError)
    async def disk_at_fault(request: Request, error: DiskError) -> Response:
        return _refusal(507, str(error))

    @app.exception_handler(UserError)
    async def refused(request: Request, error: UserError) -> Response:
        return _refusal(409, str(error))

    @app.exception_handler(OSError)
    @app.exception_handler(sqlite3.OperationalError)
    async def machine_at_fault(request: Request, error: Exception) -> Response:
        return _refusal(507, f"the hub's machine is at fault ({error}): look to the disk that holds the run")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        return _refusal(422, f"{'.'.join(str(p) for p in problem['loc'])}: {problem['msg'].lower()}")


def _refusal(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": sentence}, status_code=status)


def _hub(request: Request) -> Hub:
    return request.app.state.hub


async def _verdict(hub: Hub, worker_id: str, body: bytes) -> dict[str, str]:
    try:
        return {"outcome": await hub.post(worker_id, decode_group(body))}
    except BodyError as error:
        return {"error": str(error)}


def _add_worker_routes(app: FastAPI, run: RunDirectory) -> None:
    @app.post("/v1/workers")
    async def register(request: Request, registration: Registration) -> dict[str, Any]:
        return (await _hub(request).register(registration.name, registration.process)).model_dump()

    @app.get("/v1/workers")
    async def live_workers(request: Request) -> dict[str, Any]:
        live = await _hub(request).durably(_hub(request).roster.live_workers)
        return {"worker_ids": [w.worker_id for w in live]}

    @app.delete("/v1/workers/{worker_id}")
    async def leave(request: Request, worker_id: str, reason: str = "") -> dict[str, Any]:
        await _hub(request).leave(worker_id, reason)
        return {}

    @app.post("/v1/workers/{worker_id}/heartbeat")
    async def heartbeat(request: Request, worker_id: str, telemetry: Telemetry) -> dict[str, Any]:
        await _hub(request).durably(_hub(request).roster.heartbeat, worker_id, telemetry)
        return {}

    @app.post("/v1/workers/{worker_id}/loaded")
    async def loaded(request: Request, worker_id: str, telemetry: Telemetry) -> dict[str, Any]:
        await _hub(request).loaded(worker_id, telemetry)
        return {}

    @app.post("/v1/workers/{worker_id}/leases")
    async def lease(request: Request, worker_id: str, wanted: LeaseRequest) -> dict[str, Any]:
        # A request that outlived its sender, as in a hub that was held up, would take leases that nobody works at.
        if await request.is_disconnected():
            raise UserError(f"worker {worker_id} is not there any more to take leases")
        return (await _hub(request).lease(worker_id, wanted.limit, wanted.wait_s)).model_dump()

    @app.post("/v1/workers/{worker_id}/returns")
    async def return_leases(request: Request, worker_id: str, returned: LeaseReturn) -> dict[str, Any]:
        return {"returned": await _hub(request).return_leases(worker_id, returned.group_ids)}

    @app.post("/v1/workers/{worker_id}/rollouts")
    async def post(request: Request, worker_id: str) -> Response:
        bodies = split_groups(await request.body())
        return JSONResponse({"verdicts": [await _verdict(_hub(request), worker_id, body) for body in bodies]})

    @app.get("/v1/model/{name}")
    async def model_file(name: str) -> Response:
        file = run.model / name
        if name not in MODEL_FILES or not file.is_file():
            return _refusal(404, f"the run's model has no file {name!r}")
        return Response(file.read_bytes(), media_type="application/json")


def _add_snapshot_routes(app: FastAPI, run: RunDirectory) -> None:
    @app.get("/v1/base")
    async def base() -> Response:
        manifest = SnapshotStore(run.base, run.run_id, run.token).manifest(0) if run.base.is_dir() else None
        if manifest is None:
            return _refusal(404, "the run has no base: its snapshots hold all weights")
        return Response(manifest.model_dump_json(), media_type="application/json")

    @app.get("/v1/base/{payload_digest}/chunks")
    async def base_chunks(request: Request, payload_digest: str, first: int, count: int) -> Response:
        pieces = SnapshotStore(run.base, run.run_id, run.token).stream(0, payload_digest, first, count)
        return StreamingResponse(_hub(request).uplink.paced(pieces), media_type="application/octet-stream")

    @app.get("/v1/snapshots/newest")
    async def newest(request: Request, wait_s: Wait = 0.0, held: str | None = None) -> Response:
        route = await _hub(request).snapshot_route(held, wait_s)
        return Response(encode_route(route), media_type="application/json")

    @app.get("/v1/snapshots/{version}/{payload_digest}/chunks")
    async def chunks(request: Request, version: int, payload_digest: str, first: int, count: int) -> Response:
        pieces = _hub(request).store.stream(version, payload_digest, first, count)
        return StreamingResponse(_hub(request).uplink.paced(pieces), media_type="application/octet-stream")

    @app.post("/v1/snapshots/{version}/announce")
    async def announce(request: Request, version: int) -> dict[str, Any]:
        return {"snapshot_id": (await _hub(request).announce(version)).snapshot_id}

    @app.get("/v1/snapshots/{version}/receivers")
    async def receivers(request: Request, version: int, wait_s: Wait = 0.0) -> dict[str, Any]:
        loaded, waiting = await _hub(request).receivers(version, wait_s)
        return {"loaded": loaded, "waiting": waiting}

    @app.get("/v1/snapshots/{version}/broadcast")
    async def broadcast(request: Request, version: int) -> Response:
        record = _hub(request).broadcast_record(version)
        if record is None:
            return Response(status_code=204)
        return Response(RECORD.dump_json(record), media_type="application/json")


def _add_learner_routes(app: FastAPI) -> None:
    @app.get("/v1/batches/{step}")
    async def batch(request: Request, step: int, wait_s: Wait = 0.0) -> Response:
        found = await _hub(request).batch(step, wait_s)
        if found is None:
            return Response(status_code=204)
        return Response(encode_batch(found), media_type="application/octet-stream")

    @app.post("/v1/steps/{step}")
    async def commit(request: Request, step: int, done: StepCommit) -> dict[str, Any]:
        return {"warnings": await _hub(request).commit(step, done.metrics, done.oldest_checkpoint, done.differences)}

    @app.get("/v1/evaluations/{version}")
    async def evaluation(request: Request, version: int, wait_s: Wait = 0.0) -> Response:
        figures = await _hub(request).evaluation(version, wait_s)
        return Response(status_code=204) if figures is None else JSONResponse(figures)

    @app.post("/v1/resume")
    async def resume(request: Request, wanted: ResumeRequest) -> dict[str, Any]:
        return {"replayed_steps": await _hub(request).resume(wanted.version)}


def _add_fleet_routes(app: FastAPI) -> None:
    @app.post("/v1/paid-intervals")
    async def open_interval(request: Request, paid: PaidInterval) -> dict[str, Any]:
        roster = _hub(request).roster
        await _hub(request).durably(roster.open_interval, paid.name, paid.offer, paid.price_usd_per_hour)
        return {}

    @app.get("/v1/paid-intervals")
    async def cost(request: Request) -> dict[str, Any]:
        return {"cost_usd": await _hub(request).durably(_hub(request).roster.cost_usd)}

    @app.delete("/v1/paid-intervals/{name}")
    async def close_interval(request: Request, name: str) -> dict[str, Any]:
        await _hub(request).durably(_hub(request).roster.close_interval, name)
        return {}

    @app.put("/v1/paid-intervals/{name}")
    async def record_interval(request: Request, name: str, rented: RentedInterval) -> dict[str, Any]:
        times = (rented.launched_at_s, rented.ended_at_s)
        await _hub(request).durably(_hub(request).roster.record_interval, name, rented.offer, rented.price_usd_per_hour, *times)
        return {}

    @app.get("/v1/crew")
    async def crew(request: Request) -> dict[str, Any]:
        return {"crew": [member.model_dump() for member in await _hub(request).durably(_hub(request).roster.crew)]}

    @app.post("/v1/machines/{name}/drain")
    async def drain(request: Request, name: str) -> dict[str, Any]:
        await _hub(request).drain(name)
        return {}

    @app.get("/v1/fleet-ending")
    async def fleet_ending(request: Request, since_s: float) -> dict[str, Any]:
        return {"reason": await _hub(request).durably(_hub(request).roster.fleet_ending, since_s)}

    @app.post("/v1/events")
    async def note(request: Request, event: Event) -> dict[str, Any]:
        await _hub(request).durably(_hub(request).roster.note, event.kind, event.subject, event.detail)
        return {}


def _add_overview_routes(app: FastAPI, run: RunDirectory) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "run_id": run.run_id})

    @app.get("/v1/status")
    async def status(request: Request) -> dict[str, Any]:
        return await _hub(request).status()

    @app.get("/v1/steps")
    async def steps(request: Request) -> dict[str, Any]:
        return {"steps": await _hub(request).steps()}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        body, media_type = render_metrics(await _hub(request).status())
        return Response(body, media_type=media_type)
