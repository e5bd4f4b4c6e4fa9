# Inside the NPT lab: a Linux guest of ours with a balloon. It obeys commands on its console, and the host reads its
# memory:
#
#   a file, all of it used      whole pages of 2 MiB        promoted
#   the file, freed             reported, page by page      the host has them again
#   the file once more          the same windows            promoted again
#   a file with holes           the holes in the balloon    kept while the host has memory, then split for them
#
# The host's readings are printed as `STATE rss_kib NUMBER huge_2m NUMBER`, the guest's answers behind `guest: `, the
# report behind `report: `.
. /bin/user_space.sh

readonly FILE_MIB=64 BALLOON_MIB=24
user_space <<'INIT' || exit
fill() {
    dd if=/dev/urandom of=/tmp/file bs=1M count="$1" 2>/dev/null && says "filled $(sum_of /tmp/file)"
}

# The guest takes single pages from the smallest free piece: holes of a quarter of a mebibyte, between pages that stay.
holes() {
    for number in $(seq 1 "$1"); do
        dd if=/dev/urandom bs=256k count=1 2>/dev/null >>/tmp/file
        dd if=/dev/urandom bs=256k count=1 2>/dev/null >>/tmp/hole
    done
    says "filled $(sum_of /tmp/file)"
}

# A newly loaded driver finds a balloon with a target.
inflate() {
    rmmod virtio_balloon && rm /tmp/hole && insmod /lib/*-virtio_balloon.ko && says "inflates"
}

stty -echo
says "ready"
while read -r what size; do
    case $what in
        fill) fill "$size" ;;
        holes) holes "$size" ;;
        use) cat /tmp/file /tmp/hole 2>/dev/null | wc -c >/dev/null && says "used" ;;
        read) says "read $(sum_of /tmp/file)" ;;
        free) rm /tmp/file && says "freed" ;;
        inflate) inflate ;;
        off) complaints && poweroff -f ;;
    esac
done
INIT

trap 'cat console' EXIT
mkfifo keys && exec 3<>keys || exit
wideleaf run /bin/guest/vmlinuz --initrd guest.cpio --memory 256M --vcpus 2 --policy auto --balloon=${BALLOON_MIB}M \
    --timeout 20m --control-socket /tmp/vm --console --format json --output run.json \
    --cmdline "console=ttyS0 quiet panic=-1 noxsave pci=off" <keys >console &
vm=$!

# Sends the guest a command, and waits for the answer that begins with that word.
tell() {
    local answers
    answers=$(answers "$2")
    echo "$1" >&3
    wait_for has_more_than "$answers" "$2"
}

# Resident memory of the VM's process, and its RAM on huge pages.
resident_kib() { awk '/VmRSS/ { print $2 }' /proc/$vm/status; }
huge_bytes() { wideleaf vm /tmp/vm statistics --format json | sed -n 's/.*"huge_2m": *\([0-9]*\).*/\1/p' | head -n 1; }
look() {
    rss=$(resident_kib) huge=$(huge_bytes)
    echo "$1 rss_kib $rss huge_2m $huge"
}

# Compared with the last reading, in MiB: more on huge pages, while the guest uses its files; less resident, and less
# on huge pages. Each number is a little more than the test asks for: some pages change after the last reading here.
is_promoted() { tell use used && [ "$(huge_bytes)" -ge $((huge + ($1 << 20))) ]; }
is_given_back() { [ "$(resident_kib)" -le $((rss - ($1 << 10))) ] && [ "$(huge_bytes)" -le $((huge - ($2 << 20))) ]; }

# Linux reports free memory two seconds after it was freed.
has_settled() {
    before=$(resident_kib)
    sleep 5
    [ "$(resident_kib)" -ge $((before - 512)) ]
}

# Fills the file, and frees it after its promotion: two readings, with names that end in the argument.
fill_and_free() {
    tell "fill $FILE_MIB" filled
    wait_for is_promoted 40
    tell read read
    look "promoted$1"
    tell free freed
    wait_for is_given_back 48 40
    wait_for has_settled
    look "freed$1"
}

wait_for grep -aq 'guest: ready' console
wait_for has_settled
look ready
fill_and_free ""
fill_and_free _again
tell "holes $((FILE_MIB * 2))" filled
# Twice the guest freed what `auto` promoted, so that `auto` waits for minutes before the third time.
wideleaf vm /tmp/vm set-policy greedy
wait_for is_promoted 40
wideleaf vm /tmp/vm set-policy auto
tell inflate inflates
look inflated
# All but a tenth of the host's memory is in use.
dd if=/dev/zero of=/dev/shm/fill bs=1M 2>/dev/null \
    count=$(awk '/MemTotal/ { total = $2 } /MemAvailable/ { print int(($2 - total / 10) / 1024) }' /proc/meminfo)
wait_for is_given_back 16 16
look split
tell read read
echo off >&3
wait $vm
echo "report: $(tr -d '\n' <run.json)"
