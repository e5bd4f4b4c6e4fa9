# A libvirt for one test, in namespaces of its own (mounts, processes, network): it does not affect the machine's
# libvirt, and everything ends and vanishes at the end of standard input. Arguments: a folder with run/ and images/,
# and one for libvirt's findings about QEMU.
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
# QEMU runs as a user of its own and needs access to this device, whatever the machine's udev rules are.
if [ -e /dev/kvm ]; then
    mknod -m 666 /run/libvirt/kvm c 10 232
    mount --bind /run/libvirt/kvm /dev/kvm
fi
# Control groups belong to the machine and would stay; AppArmor's profiles do not know these paths.
printf '%s\n' 'cgroup_controllers = [ ]' 'security_driver = "none"' >/etc/libvirt/qemu.conf
virtlogd -d
libvirtd -d
# The first process of a PID namespace reaps all others, which a shell does while it waits.
cat <&3 >/run/said &
wait $!
# A test that did not report its end has failed or was killed outright. Its daemon is then dead too and cannot give
# back the pages that it added to the pool, so this script does. Pages in use go when they are unmapped.
if [ "$(cat /run/said)" != done ]; then
    kill -s KILL -- -1 || true
    now=$(cat $pool 2>/dev/null || echo 0)
    [ "$now" -le "$before" ] || echo "$before" >$pool
fi
