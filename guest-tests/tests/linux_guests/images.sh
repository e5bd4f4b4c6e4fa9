# Inside the NPT lab: images that this repository neither builds nor boots elsewhere, as packaged by Debian.
#
#   /bin/images/vmlinuz-6.1          a bzImage of Linux
#   /bin/images/memtest86+x64.bin    a bzImage of another kernel. Its header is shorter, its file ends inside a
#                                    paragraph, and it reads the last word of its command line only if its own
#                                    `cmdline_size` is not changed
#
# The host's readings are printed as `NAME NUMBER`, the guest's lines behind `guest: `, the tester's screen behind
# `screen: `.
. /bin/user_space.sh

# Linux: to user space, and off.
mkdir -p root/bin && cp /bin/busybox /bin/user_space.sh root/bin/ && cat >root/init <<'INIT' || exit
#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc
/bin/busybox --install -s /bin
mount -t proc proc /proc
. /bin/user_space.sh
says "$(uname -sr)"
complaints
poweroff -f
INIT
chmod +x root/init && (cd root && find . | cpio -o -H newc) >guest.cpio || exit
wideleaf run /bin/images/vmlinuz-6.1 --initrd guest.cpio --memory 192M --policy greedy --timeout 15m \
    --cmdline 'console=ttyS0 quiet panic=-1'
echo "linux_status $?"

# The memory tester does not end by itself: it is stopped after it has run for a while with all of its memory on huge
# pages.
trap 'tr "\033\r" "\n\n" <screen | sed "s/^/screen: /"' EXIT
readonly MEMORY_MIB=64
mkfifo keys && exec 3<>keys || exit
wideleaf run /bin/images/memtest86+x64.bin --memory ${MEMORY_MIB}M --policy greedy --timeout 15m --no-daemon --console \
    --control-socket /tmp/vm --cmdline 'nosmp console=ttyS0,115200' <keys >screen &
vm=$!
huge_bytes() { wideleaf vm /tmp/vm statistics --format json | sed -n 's/.*"huge_2m": *\([0-9]*\).*/\1/p' | head -n 1; }
is_promoted() { [ "$(huge_bytes)" -ge $((MEMORY_MIB << 20)) ]; }
# It writes the time of its pass whenever it changes on its screen.
times_shown() { grep -ao 'Time:  [0-9:]*' screen | sort -u | wc -l; }
goes_on() { [ "$(times_shown)" -ge $((before + 3)) ]; }
before=0
wait_for goes_on
wait_for is_promoted
before=$(times_shown)
wait_for goes_on
echo "huge_2m $(huge_bytes)"
wideleaf vm /tmp/vm stop --how kill
wait $vm
echo "memtest_status $?"
