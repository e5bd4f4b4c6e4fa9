# Inside the NPT lab: a Linux guest of ours is saved while it works with its disk, stopped, and continued from the
# snapshot, twice. A file in its memory is copied to the disk and compared in each pass, on both vCPUs.
#
#   boot ── pass 1, 2, … ── snapshot --stop ══ restore ── pass … ── snapshot --stop ══ restore ── pass … ── power off
#
# Its answers are printed behind `guest: `, the reports of the three runs behind `report: `.
. /bin/user_space.sh

user_space <<'INIT' || exit
mke2fs /dev/vda >/dev/null && mount -t ext2 /dev/vda /mnt
dd if=/dev/urandom of=/tmp/file bs=64k count=128 2>/dev/null
sum=$(sum_of /tmp/file)
says "sum $sum"

# Passes with a copy of its own, until the file `end` is there.
passes() {
    local number=0
    until [ -e /tmp/end ]; do
        number=$((number + 1))
        dd if=/tmp/file of="/mnt/copy$1" bs=64k conv=fsync 2>/dev/null
        [ "$(sum_of "/mnt/copy$1")" = "$sum" ] || says "wrong copy in pass $number of $1"
        says "pass $number of $1 after $(cut -d ' ' -f 1 /proc/uptime) s"
    done
}
passes a &
passes b &

stty -echo
says "ready"
while read -r what; do
    case $what in
        random) says "random $(dd if=/dev/hwrng bs=64 count=4 2>/dev/null | wc -c)" ;;
        free) says "free $(awk '/MemFree/ { print $2 }' /proc/meminfo)" ;;
        off)
            : >/tmp/end
            wait
            echo 3 >/proc/sys/vm/drop_caches
            says "kept $(sum_of /mnt/copya) $(sum_of /mnt/copyb) $(sum_of /tmp/file)"
            umount /mnt
            complaints
            poweroff -f
            ;;
    esac
done
INIT

truncate -s 32M disk.img && mkfifo keys && exec 3<>keys || exit
run() {
    wideleaf run "$@" --policy auto --timeout 20m --control-socket /tmp/vm --console --format json --output run.json
}
# Saves the VM while it works, and stops it there.
save_and_stop() {
    wideleaf vm /tmp/vm snapshot saved --stop --pause 60s || exit
    wait $vm
    echo "report: $(tr -d '\n' <run.json)"
}
continues() {
    run --restore saved <keys >>console &
    vm=$!
    wait_for wideleaf vm /tmp/vm status
    wait_for_more "pass .* of a"
    wait_for_more "pass .* of b"
    tell random
}

trap 'cat console' EXIT
run /bin/guest/vmlinuz --initrd guest.cpio --memory 192M --vcpus 2 --disk disk.img --rng --balloon \
    --cmdline "console=ttyS0 quiet panic=-1 noxsave pci=off" <keys >console &
vm=$!
wait_for grep -aq 'guest: ready' console
wait_for_more "pass .* of b"
tell random
save_and_stop
continues
wideleaf vm /tmp/vm balloon 16M >/dev/null
tell free
save_and_stop
continues
echo off >&3
wait $vm
echo "report: $(tr -d '\n' <run.json)"
