# Inside the NPT lab: a Linux guest of ours in which busybox handles the power button (acpid) and switches off. A
# request before it listens has no effect. Every line that begins with `guest:` is its own.
#
#   /bin/vmlinux         the lab's own kernel, an ELF file
#   /bin/guest           modules of the same, among them those of the button and of input events
mkdir -p root/bin root/lib root/etc/acpi/PWRF && cp /bin/busybox root/bin/ &&
    cp /bin/guest/*-button.ko /bin/guest/*-evdev.ko root/lib/ || exit
cat >root/init <<'INIT'
#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev
/bin/busybox --install -s /bin
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t devtmpfs dev /dev
echo "guest: is up"
read -r _
for module in /lib/*.ko; do insmod "$module" || echo "guest: $module did not load"; done
acpid -d &
# A button that is pressed before a process has the event's file open has no effect.
until ls -l /proc/$!/fd | grep -q /dev/input/event; do sleep 1; done
echo "guest: listens"
wait
INIT
# Action of a fixed power button, in acpid's folder.
cat >root/etc/acpi/PWRF/00000080 <<'ASKED'
#!/bin/sh
exec >/dev/console
awk '/acpi/ { print "guest: was asked, by interrupts:", $2 }' /proc/interrupts
dmesg | grep -E 'ACPI.*(Error|Warning)|nobody cared' | sed 's/^/guest: complains: /'
poweroff -f
ASKED
chmod +x root/init root/etc/acpi/PWRF/00000080 && (cd root && find . | cpio -o -H newc) >guest.cpio &&
    mkfifo keys || exit

wideleaf run /bin/vmlinux --initrd guest.cpio --memory 256M --policy never --timeout 15m --no-daemon --console \
    --control-socket vm.sock --cmdline 'console=ttyS0 quiet panic=-1' <keys >console 2>report &
run=$!
exec 3>keys

# Waits for a line of the guest, or for the end of the run.
says() {
    until grep -q "$1" console; do kill -0 $run || break; sleep 1; done
}
says 'guest: is up'
wideleaf vm vm.sock stop --how ask
echo "too early: $?"
echo >&3
says 'guest: listens'
wideleaf vm vm.sock stop --how ask
echo "in time: $?"
wait $run
echo "status $?"
cat console report
