"""A region of EC2: moto answers for AWS, and machines in namespaces of their own follow what it says of instances.

Zones lack capacity and instances are taken back as they are told to.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import threading
from pathlib import Path

import boto3
from machines import ENVIRONMENT, add_host, sh, wheel_hash
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import InstanceBackend
from moto.server import ThreadedMotoServer

REGION, IMAGE = "us-east-2", "ami-785db401"
GATEWAY = "172.31.255.254"
"""In moto's default network, all of which stays on this machine."""
PORT = 5000
POLL_S = 0.5
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "word", "AWS_DEFAULT_REGION": REGION}


class Ec2Region:
    def __init__(self, folder: Path) -> None:
        """`folder` is for the machines' logs."""
        self.full: set[str] = set()
        """Zones without capacity."""
        self._folder = folder
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = threading.Event()
        sh("ip", "addr", "add", f"{GATEWAY}/16", "dev", "lab0")
        self._lack_capacity()
        self._server = ThreadedMotoServer(ip_address=GATEWAY, port=PORT, verbose=False)
        self._server.start()
        self._client = self.client("ec2")
        for subnet in self._client.describe_subnets()["Subnets"]:
            self._client.modify_subnet_attribute(SubnetId=subnet["SubnetId"], MapPublicIpOnLaunch={"Value": False})
        self._follower = threading.Thread(target=self._follow)
        self._follower.start()

    @property
    def url(self) -> str:
        return f"http://{GATEWAY}:{PORT}"

    @property
    def environment(self) -> dict[str, str]:
        return KEYS | {"AWS_ENDPOINT_URL": self.url}

    def client(self, service: str):
        """For a service of AWS here."""
        keys = {"aws_access_key_id": KEYS["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"]}
        return boto3.client(service, endpoint_url=self.url, region_name=REGION, **keys)

    def instances(self) -> list[tuple[str, str, str]]:
        """Id, zone and market of those that are there."""
        return [
            (found["InstanceId"], found["Placement"]["AvailabilityZone"], found.get("InstanceLifecycle", "on-demand"))
            for found in self._there()
        ]

    def take_back(self, instance: str) -> None:
        """As EC2 does with a spot instance that somebody else wants."""
        self._client.terminate_instances(InstanceIds=[instance])

    def stop(self) -> None:
        self._closing.set()
        self._follower.join()
        for instance in list(self._machines):
            self._end(instance)
        self._server.stop()

    def _there(self) -> list[dict]:
        running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        reservations = self._client.describe_instances(Filters=running)["Reservations"]
        return [instance for reservation in reservations for instance in reservation["Instances"]]

    def _lack_capacity(self) -> None:
        """moto always has capacity."""
        run_instances, full = InstanceBackend.run_instances, self.full

        def run(backend, *arguments, **options):
            (interface,) = options["nics"]
            zone = backend.get_subnet(interface["SubnetId"]).availability_zone
            if zone in full:
                raise EC2ClientError("InsufficientInstanceCapacity", f"There is no capacity in {zone}.")
            return run_instances(backend, *arguments, **options)

        InstanceBackend.run_instances = run

    def _follow(self) -> None:
        while not self._closing.wait(POLL_S):
            there = {instance["InstanceId"]: instance for instance in self._there()}
            for name in there.keys() - self._machines.keys():
                self._machines[name] = self._boot(name, there[name]["PrivateIpAddress"])
            for name in self._machines.keys() - there.keys():
                self._end(name)

    def _boot(self, name: str, address: str) -> subprocess.Popen[bytes]:
        folder = Path("/run/lab/ec2") / name
        folder.mkdir(parents=True)
        attribute = self._client.describe_instance_attribute(InstanceId=name, Attribute="userData")
        script = base64.b64decode(attribute["UserData"].get("Value", "")).decode()
        (folder / "authorized_keys").write_text("\n".join(re.findall(r"ssh-(?:rsa|ed25519) \S+", script)) + "\n")
        add_host(name, f"{address}/16", GATEWAY)
        isolated = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
        command = [str(Path(__file__).parent / "ec2_machine.sh"), str(folder), str(ENVIRONMENT), wheel_hash()]
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(["nsenter", f"--net=/run/netns/{name}", *isolated, *command], stdout=log, stderr=log)

    def _end(self, name: str) -> None:
        machine = self._machines.pop(name)
        machine.kill()
        machine.wait()
        sh("ip", "netns", "del", name)
        shutil.rmtree(Path("/run/lab/ec2") / name, ignore_errors=True)
