# Inside the NPT lab: functions for the scripts in this folder and for the guests that they start.
#
#   /bin/guest           the lab's own kernel as packaged, vmlinuz, and the drivers of virtio devices in load order
#
# Guests need `noxsave`: QEMU gives them sizes of XSAVE areas that do not agree (the labs' README), and the newest
# kernel stops there.

# guest.cpio: a user space of busybox and the given programs, with the script on standard input as the rest of its
# /init. Every line of it that begins with `guest:` is a result.
user_space() {
    mkdir -p root/bin root/lib && cp /bin/busybox /bin/user_space.sh "$@" root/bin/ &&
        cp /bin/guest/[0-9]*.ko root/lib/ || return
    cat - /dev/fd/3 >root/init 3<&0 <<'INIT'
#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev /tmp /mnt
/bin/busybox --install -s /bin
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t devtmpfs dev /dev && mount -t tmpfs tmp /tmp
. /bin/user_space.sh
for module in /lib/*.ko; do insmod "$module" || says "$module did not load"; done
then=$(sed 's/.*then=//; s/ .*//' /proc/cmdline)
INIT
    chmod +x root/init && (cd root && find . | cpio -o -H newc) >guest.cpio
}

says() { echo "guest: $*"; }

# The kernel's complaints about its machine.
complaints() {
    dmesg | grep -E 'ACPI.*(Error|Warning)|PM-Timer|MP-BIOS|nobody cared|I/O error' | sed 's/^/guest: complains: /'
}

sum_of() { sha256sum "$1" | cut -d ' ' -f 1; }

# Waits until this succeeds, with a second between two attempts. After 600 of them the script ends; in the lab it prints
# the state of the lab before, with what each thread of the VMM waits for.
exec 4>&1
wait_for() {
    local tries=600
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        if [ $tries = 0 ]; then
            echo "this does not happen: $*" >&4
            [ ! -e /lab/state ] || sh /lab/state >&4 2>&1
            exit 1
        fi
        sleep 1
    done
}

# A conversation of a script with its guest: lines go to file descriptor 3, the guest's console is the file `console`.
answers() { grep -ac "guest: $1" console; }
has_more_than() { [ "$(answers "$2")" -gt "$1" ]; }
# Waits for one more answer that begins with this.
wait_for_more() { wait_for has_more_than "$(answers "$1")" "$1"; }
# Says this to the guest, and waits for an answer that begins with the same word.
tell() {
    local before
    before=$(answers "$1")
    echo "$1" >&3
    wait_for has_more_than "$before" "$1"
}
