# Inside the NPT lab: a Linux guest of ours with two processes, one with base pages and one with huge pages, and what
# the manager reads in the guest's tables:
#
#   running    each process on a vCPU of its own
#   stopped    both stopped, and other processes on the vCPUs: only the kernel's mapping of all memory leads to theirs
#
# Twice, for a guest kernel with four levels of tables and for one with five (the lab's option --five-levels). The
# guest's own words are behind `guest: `, the host's readings `LEVELS STATE {JSON}`, the report behind `report: `.
#
#   /bin/pages           fills memory with pages of one size and prints what its own smaps says
. /bin/user_space.sh

user_space /bin/pages <<'INIT' || exit
stty -echo
# Linux switches them off in a machine with less than 512 MiB.
echo madvise >/sys/kernel/mm/transparent_hugepage/enabled
echo madvise >/sys/kernel/mm/transparent_hugepage/defrag
levels=4
grep -q la57 /proc/cpuinfo && levels=5
taskset 1 pages base 32 &
base=$!
taskset 2 pages huge 32 &
huge=$!
says "has $levels levels"
read -r _
taskset 1 sh -c 'while :; do :; done' &
taskset 2 sh -c 'while :; do :; done' &
kill -STOP $base $huge
says "stopped"
read -r _
poweroff -f
INIT

pages() {
    wideleaf vm /tmp/vm statistics --format json | tr -d ' \n' | sed -n 's/.*"guest_pages":\({[^}]*}\).*/\1/p'
}
of() { pages | sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p"; }
# The AnonHugePages of the process with huge pages, in windows.
own_huge() { echo $(($(sed -n 's/.*pages huge AnonHugePages \([0-9]*\) .*/\1/p' console) / 2048)); }
# A sample with all pages of both processes, and one without.
sees_both() { [ "$(of huge_2m)" -eq "$(own_huge)" ] && [ "$(of base_4k)" -ge "$(of huge_2m)" ]; }
sees_none() { [ "$(of huge_2m)" -eq 0 ]; }

guest() { # LEVELS WORDS
    local levels=$1
    rm -f keys console && mkfifo keys && exec 3<>keys || exit
    wideleaf run /bin/guest/vmlinuz --initrd guest.cpio --memory 256M --vcpus 2 --policy aligned --timeout 15m \
        --control-socket /tmp/vm --console --format json --output run.json \
        --cmdline "console=ttyS0 quiet panic=-1 noxsave pci=off $2" <keys >console &
    vm=$!
    wait_for grep -aq 'guest: has . levels' console
    wait_for grep -aq 'guest: pages base' console
    wait_for grep -aq 'guest: pages huge' console
    wait_for sees_both
    echo "$levels running $(pages)"
    echo >&3
    wait_for grep -aq 'guest: stopped' console
    wait_for sees_none
    sleep 15 # for one more sample
    echo "$levels stopped $(pages)"
    echo >&3
    wait $vm
    cat console
    echo "report: $(tr -d '\n' <run.json)"
}
guest 4 no5lvl
guest 5 ''
