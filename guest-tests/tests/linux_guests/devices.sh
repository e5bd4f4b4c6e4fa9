# Inside the NPT lab: a Linux guest of ours that uses all its devices. It resets its machine, which ends the VM, and
# boots again on the same disks. Checksums of both sides are printed as `NAME SUM`, the guest's behind `guest: `; then
# a report of each run behind `report:`.
#
#   /bin/connect         a program that copies its input into a socket, and the socket's data to its output
. /bin/user_space.sh

readonly HOST=10.7.0.1 GUEST=10.7.0.2
user_space /bin/connect <<'INIT' || exit
HOST=10.7.0.1

disks() {
    sync # nothing: the disk is empty
    mke2fs /dev/vda >/dev/null && mount -t ext2 /dev/vda /mnt || return
    dd if=/dev/urandom of=/mnt/kept bs=64k count=160 2>/dev/null
    dd if=/dev/zero of=/mnt/lost bs=64k count=64 2>/dev/null
    rm /mnt/lost && fstrim /mnt && sync
    says "kept $(sum_of /mnt/kept)"
}

disks_again() {
    mount -t ext2 /dev/vda /mnt && says "again $(sum_of /mnt/kept)"
    says "readonly $(sum_of /dev/vdb)"
    dd if=/dev/zero of=/dev/vdb count=1 2>/dev/null || says "cannot write the second disk"
    umount /mnt
}

random_bytes() {
    says "rng $(cat /sys/class/misc/hw_random/rng_current) $(dd if=/dev/hwrng bs=64 count=4 2>/dev/null | wc -c)"
}

sockets() {
    dd if=/dev/urandom of=/tmp/sent bs=64k count=16 2>/dev/null
    connect vsock 2 1000 </tmp/sent >/tmp/got && says "vsock_out $(sum_of /tmp/sent) $(sum_of /tmp/got)"
    connect listen-vsock 1001 </tmp/sent >/tmp/got && says "vsock_in $(sum_of /tmp/sent) $(sum_of /tmp/got)"
}

network() {
    cat >/tmp/lease <<'LEASE'
#!/bin/sh
[ "$1" != bound ] || ip addr add "$ip/$mask" dev "$interface"
LEASE
    chmod +x /tmp/lease
    ip link set eth0 up
    udhcpc -i eth0 -n -q -t 60 -T 2 -s /tmp/lease >/dev/null 2>&1
    says "address $(ip addr show dev eth0 | awk '/inet / { print $2 }')"
    ping -c 3 -W 30 "$HOST" >/dev/null && says "pings"
    wget -q -O /tmp/got "http://$HOST/sent" && says "net_in $(sum_of /tmp/got)"
    dd if=/dev/urandom of=/tmp/served bs=64k count=128 2>/dev/null
    says "net_out $(sum_of /tmp/served)"
    httpd -p 80 -h /tmp
    wait_for wget -q -O /dev/null "http://$HOST/has_all"
}

case $then in
    first)
        disks
        random_bytes
        sockets
        complaints
        reboot -f
        ;;
    second)
        disks_again
        network
        complaints
        poweroff -f
        ;;
esac
INIT

boot() {
    local name=$1
    shift
    wideleaf run /bin/guest/vmlinuz --initrd guest.cpio --memory 192M --vcpus 2 --policy auto --timeout 15m \
        --disk disk.img --disk readonly.img,readonly --rng "$@" --format json --output "$name.json" \
        --cmdline "console=ttyS0 quiet panic=-1 noxsave pci=off then=$name" 2>&1 | tee "$name.log"
}

# Waits for a guest's end, and prints its report.
ends() {
    wait "$vm"
    echo "report: $(tr -d '\n' <"$1.json")"
}

insmod /bin/guest/tun.ko && truncate -s 32M disk.img && mkdir served || exit
for file in readonly.img sent served/sent; do
    dd if=/dev/urandom of=$file bs=64k count=64 2>/dev/null && echo "$file $(sum_of $file)"
done

connect listen-unix /tmp/vsock_1000 <sent >out &
boot first --vsock cid=3,socket=/tmp/vsock &
vm=$!
wait_for grep -q 'listens on 1001' first.log
connect vsock-of /tmp/vsock 1001 <sent >in
ends first
echo "vsock_out $(sum_of out)"
echo "vsock_in $(sum_of in)"

boot second --net tap=wl0 &
vm=$!
wait_for ip link show dev wl0
ip addr add $HOST/24 dev wl0
cat >udhcpd.conf <<DHCP
interface wl0
start $GUEST
end $GUEST
option subnet 255.255.255.0
lease_file /tmp/leases
pidfile /tmp/udhcpd.pid
DHCP
: >leases
udhcpd udhcpd.conf
httpd -p $HOST:80 -h served
wait_for wget -q -O got "http://$GUEST/served"
echo "net_out $(sum_of got)"
echo all >served/has_all
ends second
echo "readonly.img $(sum_of readonly.img)"
