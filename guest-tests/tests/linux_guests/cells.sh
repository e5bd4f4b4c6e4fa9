# Inside the NPT lab with two nodes: a Linux guest that sees two NUMA cells, on the nodes that its options name.
#
# The lab's one processor is on node 0. The cells' memory lies the other way round, so that no page is there by chance.
. /bin/user_space.sh
user_space <<'INIT' || exit
node=/sys/devices/system/node
says "nodes $(cat $node/online)"
for number in 0 1; do
    says "node $number has CPUs $(cat $node/node$number/cpulist), distances $(cat $node/node$number/distance)"
    # The kernel's own memory and the holes of a PC are not in MemTotal.
    awk -v number=$number '/MemTotal/ { print "guest: node " number " has " int(($4 + 65536) / 131072) * 128 " MiB" }' \
        $node/node$number/meminfo
    from=$node/node$number/access0/initiators
    says "node $number is reached best from $(cd $from && echo node*), in $(cat $from/read_latency) ns," \
        "$(cat $from/write_latency) ns, by $(cat $from/read_bandwidth) MB/s, $(cat $from/write_bandwidth) MB/s"
done
complaints
says ready
while [ ! -e /tmp/never ]; do sleep 1; done
INIT

figures='latencies=[0@81,1@139],bandwidths=[0@81920,1@20480]'
wideleaf run /bin/guest/vmlinuz --initrd guest.cpio --memory 512M --vcpus 2 --policy never --timeout 15m --prefault \
    --control-socket vm.sock --no-daemon \
    --numa "id=0,cpus=[0],memory=256M,host-nodes=[1],host-cpus=[0],distances=[1@31],$figures" \
    --numa 'id=1,cpus=[1],memory=256M,host-nodes=[0],policy=preferred,latencies=[1@91]' \
    --cmdline 'console=ttyS0 quiet panic=-1 noxsave' >result 2>said &
run=$!
wait_for grep -q 'guest: ready' said
grep 'guest: ' said
# Pages of RAM by node: mappings with a memory policy.
awk '/ bind:1 / { for (i = 3; i <= NF; i++) if ($i ~ /^N[0-9]/) print "bound " $i }
    / prefer[^ ]*:0 / { for (i = 3; i <= NF; i++) if ($i ~ /^N[0-9]/) print "preferred " $i }' \
    /proc/$run/numa_maps | sort
for task in /proc/$run/task/*; do
    case $(cat $task/comm) in
        vcpu*) echo "$(cat $task/comm) on $(sed -n 's/^Cpus_allowed_list:\t//p' $task/status)" ;;
    esac
done | sort
wideleaf vm vm.sock stop --how kill
wait $run
echo "status $?"

refused() { echo "bad: $(wideleaf run gups --no-daemon --cmdline log2_words=18 "$@" 2>&1 >/dev/null)"; }
refused --memory 64M --numa id=0,host-nodes=5
refused --memory 64M --numa id=0,host-nodes=1,host-cpus=7
refused --memory 2G --numa id=0,host-nodes=1
refused --memory 64M --numa id=0,host-nodes=0,latencies=host
wideleaf run gups --no-daemon --memory 64M --cmdline log2_words=18 2>&1 >/dev/null |
    sed -n '/memory comes from/ s/^/auto: /p'
