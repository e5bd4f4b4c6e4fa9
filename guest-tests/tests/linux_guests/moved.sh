# Inside the NPT lab: a Linux guest of ours moves to another run, and on to a third one, while it works with its disk,
# its card and a socket.
#
#   boot ── pass 1, 2, … ── migrate ══ pass … ── migrate ══ pass … ── power off
#
# A file in its memory is copied to the disk and compared in each pass, on both vCPUs; a TCP connection lasts from the
# first run to the last one. Answers of the guest are printed behind `guest: `, the reports of the three runs behind
# `report: `.
#
#   /bin/connect         a program that copies its input into a socket, and the socket's data to its output
. /bin/user_space.sh

readonly HOST=10.7.0.1 GUEST=10.7.0.2 CARD=02:00:00:00:00:aa
user_space /bin/connect <<'INIT' || exit
HOST=10.7.0.1
mke2fs /dev/vda >/dev/null && mount -t ext2 /dev/vda /mnt
dd if=/dev/urandom of=/tmp/file bs=64k count=64 2>/dev/null
sum=$(sum_of /tmp/file)
says "sum $sum"
ip addr add 10.7.0.2/24 dev eth0 && ip link set eth0 up

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

stty -echo
says "ready"
while read -r what; do
    case $what in
        work)
            passes a &
            loops=$!
            passes b &
            loops="$loops $!"
            ;;
        random) says "random $(dd if=/dev/hwrng bs=64 count=4 2>/dev/null | wc -c)" ;;
        free) says "free $(awk '/MemFree/ { print $2 }' /proc/meminfo)" ;;
        # A connection with an input that never ends.
        hold)
            mkfifo /tmp/open
            {
                connect vsock 2 1000 <>/tmp/open >/dev/null 2>&1
                says "connection ended"
            } &
            ;;
        stream)
            mkfifo /tmp/never
            {
                nc $HOST 90 <>/tmp/never >/tmp/stream
                says "stream $(sum_of /tmp/stream)"
            } &
            ;;
        net) wget -q -O /tmp/net "http://$HOST/sent" && says "net $(sum_of /tmp/net)" ;;
        socket) connect vsock 2 1000 </tmp/file >/tmp/got && says "socket $(sum_of /tmp/got)" ;;
        off)
            : >/tmp/end
            wait $loops
            echo 3 >/proc/sys/vm/drop_caches
            says "kept $(sum_of /mnt/copya) $(sum_of /mnt/copyb) $(sum_of /tmp/file)"
            umount /mnt
            complaints
            poweroff -f
            ;;
    esac
done
INIT

insmod /bin/guest/tun.ko && truncate -s 32M disk.img && mkdir served && mkfifo keys && exec 3<>keys || exit
dd if=/dev/urandom of=served/sent bs=64k count=16 2>/dev/null && echo "sent $(sum_of served/sent)"
# On no card: the guest reaches it over the card that it has at the moment.
ip addr add $HOST/32 dev lo
httpd -p $HOST:80 -h served

# A run, with a control socket, a card and sockets of its own.
run() {
    local number=$1
    shift
    wideleaf run "$@" --timeout 20m --control-socket /tmp/vm$number --disk disk.img --rng --balloon \
        --net tap=wl$number,mac=02:00:00:00:00:02 --vsock cid=3,socket=/tmp/vsock$number --console --format json \
        --output run$number.json <keys >>console 2>>errors &
    vm=$!
}
# The guest's card of this run answers from now on.
card_is() {
    wait_for ip link show dev wl$1
    ip link set dev wl$1 address $CARD
    ip link set dev wl$1 up
    ip route add $GUEST/32 dev wl$1 src $HOST
}
# All devices work in the run of this number.
works() {
    wait_for_more "pass .* of a"
    wait_for_more "pass .* of b"
    tell random
    tell net
    connect listen-unix /tmp/vsock$1_1000 <served/sent >out$1 2>listens$1 &
    local listener=$!
    wait_for grep -q listens listens$1
    tell socket
    wait $listener
    echo "socket $(sum_of out$1)"
}
# Moves the VM from the run of this number to the next one.
moves() {
    local from=$1 to=$(($1 + 1)) source=$vm
    run $to --incoming unix:/tmp/move
    wait_for [ -S /tmp/move ]
    wideleaf vm /tmp/vm$from migrate unix:/tmp/move --pause 60s >&2 || exit
    wait $source
    echo "report: $(tr -d '\n' <run$from.json)"
    card_is $to
}

trap 'cat console errors' EXIT
run 1 /bin/guest/vmlinuz --initrd guest.cpio --memory 192M --vcpus 2 --policy auto \
    --cmdline "console=ttyS0 quiet panic=-1 noxsave pci=off"
card_is 1
wait_for grep -aq 'guest: ready' console
# A line a second, until the file `over` is there.
lines() {
    local number=0
    until [ -e over ]; do
        number=$((number + 1))
        echo "line $number"
        sleep 1
    done
}
lines | tee stream | nc -l -p 90 &
echo stream >&3
echo work >&3
works 1
rm /tmp/vsock1_1000
tail -f /dev/null | connect listen-unix /tmp/vsock1_1000 2>held >/dev/null &
wait_for grep -q listens held
echo hold >&3
wait_for_more "pass .* of b"
moves 1
works 2
wideleaf vm /tmp/vm2 balloon 16M >/dev/null
tell free
moves 2
works 3
: >over
wait_for has_more_than 0 stream
echo "stream $(sum_of stream)"
echo off >&3
wait $vm
echo "report: $(tr -d '\n' <run3.json)"
