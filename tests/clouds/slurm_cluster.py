"""A Slurm cluster of Debian's packages: controller and login node here, each compute node in a network namespace of its own.

Two partitions share the nodes: what runs in `spot` makes way for what is submitted to `ondemand`. GPUs are device files that
nobody opens. What SkyPilot would download to a node, uv and its own runtime, is put there before the job starts.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from machines import ENVIRONMENT, Daemons, add_host, sh, wheel_hash
from patience import wait_until

NETWORK, HEAD = "10.77.0", "10.77.0.1"
SETTINGS = """
ClusterName=lab
SlurmctldHost=head({head})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/logs/slurmctld.log
SlurmdLogFile={folder}/logs/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
KillWait=30
SlurmdTimeout=300
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
PrologSlurmctld={folder}/prolog.sh
PartitionName=ondemand Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=1-00:00:00 State=UP PriorityTier=1 PreemptMode=CANCEL
"""
PROLOG = """#!/bin/bash
[[ $SLURM_JOB_NAME == echo2-* ]] || exit 0
home={home}/.sky_clusters/$SLURM_JOB_NAME runtime={folder}/tmp/$SLURM_JOB_NAME
mkdir -p "$home/.local/bin" "$home/.sky/wheels" "$runtime/.sky"
ln -sfn {environment}/bin/uv "$home/.local/bin/uv"
ln -sfn {environment} "$home/sky-user-env"
ln -sfn {environment} "$runtime/skypilot-runtime"
echo {wheel_hash} > "$home/.sky/wheels/current_sky_wheel_hash"
"""
LOGIN = """
Port 22
ListenAddress {head}
HostKey {folder}/host_key
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
MaxSessions 100
MaxStartups 200:30:400
Subsystem sftp internal-sftp
"""


class SlurmCluster:
    """Nodes with one L4 each, by name."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self.nodes, self.home = folder, nodes, folder / "home"
        for part in ("home/.ssh", "state", "spool", "tmp", "logs"):
            (folder / part).mkdir(parents=True)
        self._daemons = Daemons(folder / "logs")
        self._write_settings()
        self._start()

    @property
    def ssh_config(self) -> str:
        """What SkyPilot wants in ~/.slurm/config."""
        return f"Host lab\n  HostName {HEAD}\n  User root\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n"

    @property
    def sky_config(self) -> str:
        return f"slurm:\n  cluster_configs:\n    lab:\n      tmpdir: {self.folder}/tmp\n"

    def jobs(self) -> list[tuple[str, str, str]]:
        """Name, state and node of the jobs that are pending or run."""
        lines = sh("squeue", "--noheader", "--format=%j|%T|%N").splitlines()
        return [tuple(line.split("|")) for line in lines]  # type: ignore[misc]

    def preempt(self, job: str) -> None:
        """A job of the partition that comes first wants the node of `job`, for a second."""
        (node,) = [node for name, _, node in self.jobs() if name == job]
        sh("sbatch", "--partition=ondemand", f"--nodelist={node}", "--gres=gpu:1", "--output=/dev/null", "--wrap=sleep 1")

    def occupy(self, nodes: Sequence[str]) -> None:
        """Somebody else's job takes these nodes."""
        for node in nodes:
            sh("sbatch", "--job-name=other", f"--nodelist={node}", "--gres=gpu:1", "--output=/dev/null", "--wrap=sleep 900")

    def vacate(self) -> None:
        sh("scancel", "--name=other")

    def stop(self) -> None:
        self._daemons.stop()

    def _write_settings(self) -> None:
        folder, places = self.folder, {"folder": self.folder, "head": HEAD, "home": self.home}
        settings, devices = SETTINGS.format(**places), ""
        for node in self.nodes:
            os.mknod(folder / f"gpu-{node}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
            settings += f"NodeName={node} NodeAddr={self._address(node)} CPUs=4 RealMemory=4000 Gres=gpu:L4:1\n"
            devices += f"NodeName={node} Name=gpu Type=L4 File={folder}/gpu-{node}\n"
        Path("/etc/slurm").mkdir(exist_ok=True)
        Path("/etc/slurm/slurm.conf").write_text(settings.replace("Nodes=ALL", f"Nodes={','.join(self.nodes)}"))
        Path("/etc/slurm/gres.conf").write_text(devices)
        prolog = folder / "prolog.sh"
        prolog.write_text(PROLOG.format(**places, environment=ENVIRONMENT, wheel_hash=wheel_hash()))
        prolog.chmod(0o755)
        (folder / "sshd_config").write_text(LOGIN.format(**places))
        hosts = [f"{HEAD} head", *(f"{self._address(node)} {node}" for node in self.nodes)]
        with Path("/etc/hosts").open("a") as file:
            file.write("\n".join(hosts) + "\n")
        accounts = Path("/etc/passwd")
        root, *others = accounts.read_text().splitlines(keepends=True)
        accounts.write_text("".join([f"root:x:0:0:root:{self.home}:/bin/bash\n", *others]))
        assert root.startswith("root:")

    def _start(self) -> None:
        folder, start = self.folder, self._daemons.start
        sh("hostname", "head")
        sh("ip", "addr", "add", f"{HEAD}/24", "dev", "lab0")
        for key in ("host_key", "key"):
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        (self.home / ".ssh/authorized_keys").write_text((folder / "key.pub").read_text())
        sh("install", "-d", "-o", "munge", "-g", "munge", "-m", "755", "/run/munge")
        Path("/etc/munge/munge.key").write_bytes(os.urandom(128))
        sh("chown", "-R", "munge:munge", "/etc/munge")
        start("munged", "setpriv", "--reuid=munge", "--regid=munge", "--init-groups", "munged", "--foreground", "--force")
        wait_until(lambda: Path("/run/munge/munge.socket.2").exists())
        start("sshd", "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config"))
        start("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            add_host(node, f"{self._address(node)}/24", HEAD)
            (folder / "spool" / node).mkdir()
            command = f"hostname {node}; exec slurmd -D -N {node}"
            start(node, "nsenter", f"--net=/run/netns/{node}", "unshare", "--uts", "sh", "-c", command)
        wait_until(self._is_idle)

    def _is_idle(self) -> bool:
        time.sleep(0.2)
        try:
            idle = sh("sinfo", "--noheader", "--Node", "--partition=spot", "--states=idle", "--format=%N")
        except AssertionError:
            return False
        return set(idle.split()) == set(self.nodes)

    def _address(self, node: str) -> str:
        return f"{NETWORK}.{11 + self.nodes.index(node)}"
