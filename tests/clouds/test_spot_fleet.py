"""True spot machines on a region of EC2, by `echo2 fleet` and SkyPilot: a zone lacks capacity, an instance is taken back and
replaced elsewhere, and in the end nothing is left."""

from __future__ import annotations

import hashlib

import pytest
import yaml
from ec2_region import GATEWAY, IMAGE, KEYS, REGION, Ec2Region
from machines import (
    ENVIRONMENT,
    INSIDE,
    REPOSITORY,
    WORKERS,
    Daemons,
    SkyPilot,
    launches_and_losses,
    protect,
    ready,
)
from patience import PATIENCE_S, wait_until

from echo2.hub.client import HubClient
from echo2.hub.inspection import costs_of

pytestmark = [
    pytest.mark.skipif(not INSIDE, reason="SkyPilot has an environment of its own: make test-clouds"),
    pytest.mark.timeout(1800),
]
PORT = 8700
CATALOG = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone,Arch
g6.xlarge,L4,1,4,16,,8.05,2.0,us-east-2,use2-az1,x86_64
g6.xlarge,L4,1,4,16,,8.05,2.5,us-east-2,use2-az2,x86_64
g6.xlarge,L4,1,4,16,,8.05,3.0,us-east-2,use2-az3,x86_64
"""
ZONES = "AvailabilityZoneName,AvailabilityZone\nus-east-2a,use2-az1\nus-east-2b,use2-az2\nus-east-2c,use2-az3\n"
IMAGES = "".join(
    f"skypilot:custom-{kind},{REGION},ubuntu,22.04,{IMAGE},20160101,{IMAGE}\n"
    for kind in ("gpu-ubuntu", "gpu-ubuntu-cuda13", "cpu-ubuntu")
)
SKY_FILES = {
    ".sky/config.yaml": "allowed_clouds: [aws]\naws:\n  use_internal_ips: true\n  ssh_proxy_command: nc %h %p\n",
    ".aws/credentials": f"[default]\naws_access_key_id = {KEYS['AWS_ACCESS_KEY_ID']}\n"
    f"aws_secret_access_key = {KEYS['AWS_SECRET_ACCESS_KEY']}\n",
    ".sky/catalogs/v8/aws/vms.csv": CATALOG,
    ".sky/catalogs/v8/aws/images.csv": f"Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId\n{IMAGES}",
    ".sky/catalogs/v8/aws/instance_quota_mapping.csv": "InstanceType,OnDemandInstanceCode,SpotInstanceCode\n",
    ".sky/catalogs/v8/common/accelerators.csv": "AcceleratorName,Clouds\nL4,['AWS']\n",
}
OFFERS = {name: f"aws/us-east-2/use2-az{number}/g6.xlarge/spot" for number, name in enumerate("abc", 1)}


@pytest.fixture(scope="module")
def ec2(tmp_path_factory):
    protect(ENVIRONMENT)
    made = Ec2Region(tmp_path_factory.mktemp("ec2"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def sky(ec2, tmp_path_factory):
    made = SkyPilot(tmp_path_factory.mktemp("sky") / "home", ec2.environment)
    for name, content in SKY_FILES.items():
        made.write(name, content)
    # What an account calls its zones is kept by user; to ask each region of AWS for it takes minutes.
    user = ec2.client("sts").get_caller_identity()["UserId"]
    made.write(f".sky/catalogs/v8/aws/az_mappings-{hashlib.md5(user.encode()).hexdigest()[:8]}.csv", ZONES)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def task(tmp_path):
    """The shipped task, with this repository's environment in place of its set-up."""
    content = yaml.safe_load((REPOSITORY / "examples/worker.sky.yaml").read_text())
    del content["workdir"]
    content["setup"] = f"mkdir -p ~/echo2-worker && ln -sfn {WORKERS}/bin ~/echo2-worker/bin"
    content["envs"]["PYTHONPATH"] = str(REPOSITORY)
    file = tmp_path / "worker.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture
def daemons(tmp_path):
    made = Daemons(tmp_path / "logs")
    yield made
    made.stop()
    print(made.said())


def test_spot_machines_are_rented_where_there_is_capacity_replaced_when_taken_back_and_ended(
    ec2, sky, task, daemons, make_run, publish
):
    run = make_run(
        f"hub.host={GATEWAY}",
        f"hub.port={PORT}",
        "worker.simulated_group_latency_s=5.0",
        "worker.orphan_timeout_s=10",
        f"activation.catalog={sky.home / '.sky/catalogs/v8'}",
        f"activation.worker_task={task}",
        "activation.completion_tokens=4096",
        "activation.pace={period_s=10.0, first_block_s=300.0}",
        "capacity.learner_step_s=25.0",
        "capacity.transfer_s=0.1",
    )
    hub = daemons.echo2(WORKERS, "hub", str(run.path))
    client = HubClient(f"http://{GATEWAY}:{PORT}", run.token, patience_s=PATIENCE_S)
    publish(run, client, 0)
    ec2.full.add("us-east-2a")
    fleet = daemons.echo2(ENVIRONMENT, "fleet", str(run.path), "--hub", client.url, environment=sky.environment)
    (name,) = wait_until(lambda: ready(client))
    ((first, zone, market),) = ec2.instances()
    assert (zone, market) == ("us-east-2b", "spot"), "the cheapest zone has no capacity, the next one has"
    ec2.take_back(first)
    ((_, zone, market),) = wait_until(ec2.instances)
    assert (zone, market) == ("us-east-2c", "spot"), "elsewhere"
    assert launches_and_losses(run)[OFFERS["b"]] == (1, 1), "one that was taken back is known as lost"
    # The end of the run is the end of a machine even while that is being launched.
    hub.terminate()
    assert fleet.wait(PATIENCE_S) == 0
    wait_until(lambda: ec2.instances() == [])
    assert sky.clusters() == []
    costs = costs_of(run)
    assert costs.running == 0 and name == f"echo2-{run.run_id}-1"
    assert {cost.offer: cost.usd > 0 for cost in costs.offers}[OFFERS["a"]] is False, "no machine, no money"
