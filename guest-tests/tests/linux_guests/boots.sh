# Inside the NPT lab: Linux guests of ours with two vCPUs and a user space of busybox, each ended another way. Every line that
# begins with `guest:` is one of theirs.
#
#   /bin/vmlinux         the lab's own kernel, an ELF file
#   /bin/guest           the same as it is packaged, vmlinuz, and the drivers of virtio devices in the order in which they load
mkdir -p root/bin root/lib && cp /bin/busybox root/bin/ && cp /bin/guest/[0-9]*.ko root/lib/ || exit
cat >root/init <<'INIT'
#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t devtmpfs dev /dev && mount -t tmpfs tmp /tmp
for module in /lib/*.ko; do insmod "$module" || echo "guest: $module did not load"; done
echo "guest: $(nproc) processors, clock $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
taskset 2 echo "guest: the second one works"
awk '/LOC:/ && $2 > 0 && $3 > 0 { print "guest: both have timer interrupts" }' /proc/interrupts
awk '/ttyS0/ && $2 + $3 > 0 { print "guest: the serial port interrupts" }' /proc/interrupts
dmesg | grep -E 'ACPI.*(Error|Warning)|PM-Timer|MP-BIOS|nobody cared' | sed 's/^/guest: complains: /'
then=$(sed 's/.*then=//; s/ .*//' /proc/cmdline)
[ "$then" != panic ] || exit 3 # of process 1: the kernel panics
dd if=/dev/zero of=/tmp/fill bs=1M count=96 2>/dev/null && echo "guest: filled $(wc -c </tmp/fill) bytes"
case $then in
    off) poweroff -f ;;
    reboot) reboot -f ;;
esac
INIT
chmod +x root/init && (cd root && find . | cpio -o -H newc) >guest.cpio || exit

boots() {
    echo "boots: $1 $2 $3"
    wideleaf run "$1" --initrd guest.cpio --memory 256M --vcpus 2 --policy "$2" --timeout 15m \
        --cmdline "console=ttyS0 quiet panic=-1 $3"
    echo "status $?"
}
boots /bin/guest/vmlinuz auto then=off
boots /bin/vmlinux greedy then=reboot
boots /bin/vmlinux never 'then=panic reboot=k'
