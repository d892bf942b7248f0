#!/usr/bin/env bash
# The first process of a machine of EC2, in namespaces of its own: ec2_machine.sh FOLDER ENVIRONMENT WHEEL_HASH. Its root is a layer
# over this machine's; what SkyPilot would download to it, uv and its own runtime, is there. Root is called ubuntu.
set -euo pipefail
folder=$1 environment=$2 wheel_hash=$3 root=$1/root
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount --make-rprivate /
mkdir -p "$folder/upper" "$folder/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root/run/sshd"
hostname "$(basename "$folder")"
echo "127.0.1.1 $(hostname)" >> "$root/etc/hosts"
sed -i '/^root:/s/.*/ubuntu:x:0:0::\/home\/ubuntu:\/bin\/bash/' "$root/etc/passwd"
sed -i '/^root:/s/root/ubuntu/' "$root/etc/shadow"
home=$root/home/ubuntu
mkdir -p "$home/.ssh" "$home/.local/bin" "$home/.sky/wheels"
cp "$folder/authorized_keys" "$home/.ssh/authorized_keys"
ln -s "$environment/bin/uv" "$home/.local/bin/uv"
ln -s "$environment" "$home/skypilot-runtime"
ln -s "$environment" "$home/sky-user-env"
echo "$wheel_hash" > "$home/.sky/wheels/current_sky_wheel_hash"
echo "ubuntu ALL=(ALL) NOPASSWD:ALL" > "$root/etc/sudoers.d/ubuntu"
rm -f "$root"/etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/lab"
exec chroot "$root" /usr/sbin/sshd -D -e -f /dev/null -h /etc/ssh/lab -p 22 -o UsePAM=no -o StrictModes=no -o PidFile=none \
  -o PermitRootLogin=prohibit-password -o MaxSessions=100 -o MaxStartups=100 -o Subsystem="sftp internal-sftp"
