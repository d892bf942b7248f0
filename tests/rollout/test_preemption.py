"""A worker hears from its cloud that the machine is taken back, and leaves while it can."""

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from patience import wait_until

from echo2.rollout.preemption import BOARDS, Azure, Ec2, Gce, NoticeReader, board_of

NAME = "worker-7"


class Metadata:
    """The metadata service of all three clouds, which says what it is told to."""

    def __init__(self):
        self.notice, self.requests, self.broken = {}, [], False
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self._answer(200, "secret")

            def do_GET(self):
                service.requests.append(self.path)
                if service.broken:
                    self._answer(500, "")
                elif self.path == "/latest/meta-data/spot/instance-action":
                    assert self.headers["X-aws-ec2-metadata-token"] == "secret"
                    told = service.notice.get("aws")
                    self._answer(200 if told else 404, json.dumps(told))
                elif self.path == "/computeMetadata/v1/instance/preempted":
                    assert self.headers["Metadata-Flavor"] == "Google"
                    self._answer(200, service.notice.get("gcp", "FALSE"))
                elif self.path.startswith("/metadata/scheduledevents?api-version="):
                    assert self.headers["Metadata"] == "true"
                    self._answer(200, json.dumps({"Events": service.notice.get("azure", [])}))
                elif self.path.startswith("/metadata/instance/compute/name?"):
                    self._answer(200, NAME)

            def _answer(self, code, text):
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metadata():
    made = Metadata()
    yield made
    made.stop()


@pytest.fixture
def read(metadata, monkeypatch):
    """Starts to read the board of a cloud; gives the notices that came, and the reader."""
    readers = []

    def start(cloud):
        heard = []
        monkeypatch.setattr(BOARDS[cloud], "interval_s", 0.05)
        readers.append(NoticeReader(BOARDS[cloud], heard.append, metadata.url))
        readers[-1].start()
        return heard, readers[-1]

    yield start
    for reader in readers:
        reader.stop()
        reader.join(10.0)
        reader.raise_if_failed()


def preempt(*machines):
    return {"EventType": "Preempt", "Resources": list(machines), "NotBefore": "Mon, 19 Sep 2022 18:29:47 GMT"}


NOTICES = {
    "aws": ({"action": "terminate", "time": "2026-11-30T18:00:00Z"}, "EC2 says terminate at 2026-11-30T18:00:00Z"),
    "gcp": ("TRUE", "Compute Engine says preempted"),
    "azure": ([preempt("other", NAME)], "Azure says preempt Mon, 19 Sep 2022 18:29:47 GMT"),
}


@pytest.mark.parametrize("cloud", NOTICES)
def test_a_notice_is_heard_once_and_nothing_before_it(cloud, metadata, read):
    heard, reader = read(cloud)
    wait_until(lambda: len(metadata.requests) >= 3)
    assert heard == []
    metadata.notice[cloud], sentence = NOTICES[cloud]
    wait_until(lambda: heard)
    reader.join(10.0)
    assert heard == [sentence]


def test_what_happens_to_other_machines_or_is_no_end_is_no_notice(metadata, read):
    metadata.notice["azure"] = [preempt("other"), {"EventType": "Freeze", "Resources": [NAME], "NotBefore": ""}]
    heard, _ = read("azure")
    wait_until(lambda: len(metadata.requests) >= 6)
    assert heard == []


@pytest.mark.parametrize("cloud", NOTICES)
def test_a_service_that_fails_is_told_once_and_asked_on(cloud, metadata, read, caplog):
    metadata.broken = True
    heard, _ = read(cloud)
    wait_until(lambda: len(metadata.requests) >= 3)
    assert [record.levelno for record in caplog.records if record.name == "echo2.rollout.preemption"] == [logging.WARNING]
    metadata.notice[cloud], metadata.broken = NOTICES[cloud][0], False
    wait_until(lambda: heard)


def test_the_board_goes_by_the_setting_or_by_the_machines_maker(tmp_path):
    maker = tmp_path / "sys_vendor"
    for content, expected in (("Amazon EC2\n", Ec2), ("Google\n", Gce), ("Microsoft Corporation\n", Azure), ("QEMU\n", None)):
        maker.write_text(content)
        assert board_of("auto", maker) is expected
    assert board_of("auto", tmp_path / "absent") is None
    assert board_of("none", maker) is None and board_of("gcp", maker) is Gce
