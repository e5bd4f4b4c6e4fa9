#!/bin/sh
# Holds a host of its own for Ansible: this machine's files with changes in memory, and no network but its loopback.
#
#   unshare --mount --pid --net --fork hold.sh FOLDER STAND_IN
#
# Prints `ready`, and ends when its standard input does; everything that was started in it ends with it.
set -e
folder=$1
mount -t tmpfs -o mode=0755 tmpfs "$folder"
mkdir "$folder/upper" "$folder/work" "$folder/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
mount -t proc proc "$folder/root/proc"
mount --rbind /sys "$folder/root/sys"
mount --rbind /dev "$folder/root/dev"
mount -t tmpfs -o mode=0755 tmpfs "$folder/root/run"
ip link set lo up
# A host where systemd runs, as far as Ansible and the scripts of Debian's packages look.
mkdir -p "$folder/root/run/systemd/system" "$folder/root/run/lock"
cp "$2" "$folder/root/usr/bin/systemctl"
# The index of manual pages takes longer than all else that a package does.
rm -f "$folder/root/usr/sbin/policy-rc.d" "$folder/root/var/lib/man-db/auto-update"
exec chroot "$folder/root" /bin/sh -c 'echo ready; read -r _ || true'
