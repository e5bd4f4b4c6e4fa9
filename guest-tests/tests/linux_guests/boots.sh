# Inside the NPT lab: Linux guests of ours with two vCPUs and a user space of busybox, each ended another way.
#
#   /bin/vmlinux         the lab's own kernel, an ELF file
. /bin/user_space.sh
user_space <<'INIT' || exit
says "$(nproc) processors, clock $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
taskset 2 echo "guest: the second one works"
awk '/LOC:/ && $2 > 0 && $3 > 0 { print "guest: both have timer interrupts" }' /proc/interrupts
awk '/ttyS0/ && $2 + $3 > 0 { print "guest: the serial port interrupts" }' /proc/interrupts
complaints
[ "$then" != panic ] || exit 3 # of process 1: the kernel panics
dd if=/dev/zero of=/tmp/fill bs=1M count=96 2>/dev/null && says "filled $(wc -c </tmp/fill) bytes"
case $then in
    off) poweroff -f ;;
    reboot) reboot -f ;;
esac
INIT

boots() {
    echo "boots: $1 $2 $3"
    wideleaf run "$1" --initrd guest.cpio --memory 256M --vcpus 2 --policy "$2" --timeout 15m \
        --cmdline "console=ttyS0 quiet panic=-1 $3"
    echo "status $?"
}
boots /bin/guest/vmlinuz auto then=off
boots /bin/vmlinux greedy then=reboot
boots /bin/vmlinux never 'then=panic reboot=k'
