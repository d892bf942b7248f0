"""Word from the cloud that it takes this machine back, read where a machine can ask for it and nobody tells its processes.

Invariants: a cloud is asked on its own machines alone, unless the setting names one; a place that does not answer holds up
nothing, and that is said once; a notice is passed on once.

Notice before the end, by the clouds' documents: EC2 two minutes, Google Compute Engine and Azure half a minute.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import httpx

from echo2.rollout.background import Background

log = logging.getLogger(__name__)
ADDRESS = "http://169.254.169.254"
VENDOR_FILE = Path("/sys/class/dmi/id/sys_vendor")
TIMEOUT_S = 5.0


class NoticeBoard(ABC):
    """Where one cloud writes what it is about to do with a machine."""

    vendor: ClassVar[str]
    """As its machines name their maker."""
    interval_s: ClassVar[float]

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    @abstractmethod
    def read(self) -> str:
        """What the machine is told, empty for nothing. Raises httpx.HTTPError, ValueError where the cloud does not answer."""

    def _get(self, path: str, **headers: str) -> httpx.Response:
        answer = self._http.get(path, headers=headers)
        if answer.status_code != httpx.codes.NOT_FOUND:
            answer.raise_for_status()
        return answer


class Ec2(NoticeBoard):
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""

    vendor, interval_s = "Amazon EC2", 5.0

    def read(self) -> str:
        token = self._http.put("/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        token.raise_for_status()
        answer = self._get("/latest/meta-data/spot/instance-action", **{"X-aws-ec2-metadata-token": token.text})
        if answer.status_code == httpx.codes.NOT_FOUND:
            return ""
        told = answer.json()
        return f"EC2 says {told['action']} at {told['time']}"


class Gce(NoticeBoard):
    """https://docs.cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption"""

    vendor, interval_s = "Google", 2.0

    def read(self) -> str:
        answer = self._get("/computeMetadata/v1/instance/preempted", **{"Metadata-Flavor": "Google"})
        return "Compute Engine says preempted" if answer.text.strip() == "TRUE" else ""


class Azure(NoticeBoard):
    """https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events"""

    vendor, interval_s = "Microsoft Corporation", 2.0

    def read(self) -> str:
        events = self._get("/metadata/scheduledevents?api-version=2020-07-01", Metadata="true").json()["Events"]
        preempting = [event for event in events if event["EventType"] == "Preempt"]
        if not preempting:
            return ""
        # The events of all machines of a set are shown to each of them.
        name = self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text", Metadata="true").text
        return next((f"Azure says preempt {e['NotBefore']}".rstrip() for e in preempting if name in e["Resources"]), "")


BOARDS: dict[str, type[NoticeBoard]] = {"aws": Ec2, "gcp": Gce, "azure": Azure}


def board_of(setting: str, vendor_file: Path = VENDOR_FILE) -> type[NoticeBoard] | None:
    """What `worker.preemption_notice` asks for: `auto` goes by the machine's maker; None for no cloud that tells."""
    if setting != "auto":
        return BOARDS.get(setting)
    try:
        vendor = vendor_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return next((board for board in BOARDS.values() if board.vendor == vendor), None)


class NoticeReader(Background):
    """Calls `on_notice` with what the board says, in a thread of its own, and ends."""

    def __init__(self, board: type[NoticeBoard], on_notice: Callable[[str], None], address: str = ADDRESS) -> None:
        super().__init__("notices")
        self._http = httpx.Client(base_url=address, timeout=TIMEOUT_S, trust_env=False)
        self._board, self._on_notice = board(self._http), on_notice
        self._told = False

    def _loop(self) -> None:
        with self._http:
            while not self.stopping.is_set():
                try:
                    notice = self._board.read()
                except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                    self._tell_once(error)
                    notice = ""
                if notice:
                    self._on_notice(notice)
                    return
                self.stopping.wait(self._board.interval_s)

    def _tell_once(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "nobody tells when this machine is taken back (%r): set worker.preemption_notice to its cloud, or none", error
            )
