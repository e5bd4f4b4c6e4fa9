# Inside the NPT lab: Linux guests of ours with two vCPUs and a user space of busybox. Each ends in another way; one
# first boots again in place.
#
#   /bin/vmlinux         the lab's own kernel, an ELF file
. /bin/user_space.sh
user_space <<'INIT' || exit
says "$(nproc) processors, clock $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
says "packages $(echo $(cat /sys/devices/system/cpu/cpu[01]/topology/physical_package_id))"
taskset 2 echo "guest: the second one works"
awk '/LOC:/ && $2 > 0 && $3 > 0 { print "guest: both have timer interrupts" }' /proc/interrupts
awk '/ttyS0/ && $2 + $3 > 0 { print "guest: the serial port interrupts" }' /proc/interrupts
complaints
[ "$then" != panic ] || exit 3 # of process 1: the kernel panics
dd if=/dev/zero of=/tmp/fill bs=1M count=96 2>/dev/null && says "filled $(wc -c </tmp/fill) bytes"
case $then in
    off) poweroff -f ;;
    again) # The disk records an earlier boot; memory does not.
        grep -q booted /dev/vda && poweroff -f
        echo booted >/dev/vda && sync && reboot -f
        ;;
esac
INIT

boots() {
    echo "boots: $1 $2 $3"
    local image=$1 policy=$2 words=$3
    shift 3
    wideleaf run "$image" --initrd guest.cpio --memory 256M --vcpus 2 --policy "$policy" --timeout 15m "$@" \
        --cmdline "console=ttyS0 quiet panic=-1 noxsave $words"
    echo "status $?"
}
boots /bin/guest/vmlinuz auto then=off
truncate -s 1M disk.img
boots /bin/vmlinux greedy then=again --on-reset restart --disk disk.img
boots /bin/vmlinux never 'then=panic reboot=k'
