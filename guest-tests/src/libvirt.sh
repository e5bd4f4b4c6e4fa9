# A libvirt for one test, in namespaces of its own (mounts, processes, network): the machine's libvirt is neither seen nor
# touched, and everything ends and vanishes when the end of standard input is reached.
# Arguments: a folder with run/ and images/, and one where libvirt keeps what it finds out about QEMU.
set -eu
folder=$1 cache=$2
exec 3<&0
pool=/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
before=$(cat $pool 2>/dev/null || echo 0)
mount -t tmpfs -o mode=755 none /run
for place in /etc/libvirt /var/lib/libvirt /var/log/libvirt; do
    mount -t tmpfs -o mode=755 none "$place"
done
mkdir -p /run/libvirt /run/wideleaf /var/lib/libvirt/images /var/lib/libvirt/hugepages
mount --bind "$folder/run" /run/wideleaf
mount --bind "$folder/images" /var/lib/libvirt/images
mount --bind "$cache" /var/cache/libvirt
# libvirt takes any mount; /dev/hugepages is not on every machine.
mount -t hugetlbfs -o pagesize=2M none /var/lib/libvirt/hugepages
# QEMU runs as a user of its own, who may use this device whatever the machine's udev rules are.
if [ -e /dev/kvm ]; then
    mknod -m 666 /run/libvirt/kvm c 10 232
    mount --bind /run/libvirt/kvm /dev/kvm
fi
# Control groups are the machine's and would stay; AppArmor's profiles do not know this place.
printf '%s\n' 'cgroup_controllers = [ ]' 'security_driver = "none"' >/etc/libvirt/qemu.conf
virtlogd -d
libvirtd -d
# The first process of a PID namespace reaps all others, which a shell does while it waits.
cat <&3 >/run/said &
wait $!
# A test that did not say that it was done has failed, or was killed outright; so is its daemon now, and nobody comes after it who would
# give back what it added to the pool. Pages that somebody still has go when they are unmapped.
if [ "$(cat /run/said)" != done ]; then
    kill -s KILL -- -1 || true
    now=$(cat $pool 2>/dev/null || echo 0)
    [ "$now" -le "$before" ] || echo "$before" >$pool
fi
