/*
 * fake-counters: runs a command on a machine that seems to have performance counters.
 *
 *   fake-counters [--errno NUMBER] COMMAND [ARGUMENT]...
 *
 * A seccomp filter stops the command and its children at perf_event_open(2), and at ioctl(2) and read(2) of the
 * descriptors that it returned. This process answers instead of the kernel (seccomp_unotify(2)): a counter rises by a
 * fixed number of events in a microsecond. With --errno, no counter can be opened.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/perf_event.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Numbers of the counters' descriptors: above those of the command, below the usual limit of 1024. */
#define FIRST 600
#define LAST 999

/* Events in a microsecond: cycles, and each raw event. */
#define CYCLES 3000
#define RAW 30

struct counter {
	uint64_t rate, format, opened_ns;
};
static struct counter counters[LAST + 1];
static int latest = FIRST - 1;

static void fail(const char *what)
{
	perror(what);
	exit(125);
}

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* Returns the descriptor that delivers the calls. */
static int install_filter(void)
{
	const unsigned number = offsetof(struct seccomp_data, nr), first = offsetof(struct seccomp_data, args[0]);
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, number),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_perf_event_open, 5, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_read, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 4),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, first),
		BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, FIRST, 0, 2),
		BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, LAST, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof code / sizeof *code, code };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		fail("prctl");
	int listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
	if (listener < 0)
		fail("seccomp");
	return listener;
}

static void send_descriptor(int socket, int descriptor)
{
	char byte = 0, control[CMSG_SPACE(sizeof descriptor)] = { 0 };
	struct iovec data = { &byte, 1 };
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control,
	};
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof descriptor);
	memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
	if (sendmsg(socket, &message, 0) < 0)
		fail("sendmsg");
}

static int receive_descriptor(int socket)
{
	int descriptor;
	char byte, control[CMSG_SPACE(sizeof descriptor)];
	struct iovec data = { &byte, 1 };
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control,
	};
	if (recvmsg(socket, &message, 0) <= 0 || !CMSG_FIRSTHDR(&message))
		exit(125);
	memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
	return descriptor;
}

/* Copies bytes from or to the memory of the process that waits. Returns an errno, or 0. */
static int copy(pid_t pid, uint64_t address, void *bytes, size_t length, int is_read)
{
	struct iovec ours = { bytes, length }, theirs = { (void *)address, length };
	ssize_t done = is_read ? process_vm_readv(pid, &ours, 1, &theirs, 1, 0)
			       : process_vm_writev(pid, &ours, 1, &theirs, 1, 0);
	return done == (ssize_t)length ? 0 : EFAULT;
}

/* Opens a counter for the process that waits. Returns its descriptor there, or a negative errno. */
static int open_counter(int listener, const struct seccomp_notif *call)
{
	struct perf_event_attr event = { 0 };
	if (copy(call->pid, call->data.args[0], &event, PERF_ATTR_SIZE_VER0, 1))
		return -EFAULT;
	if (event.read_format & PERF_FORMAT_GROUP)
		return -EINVAL;
	latest = latest == LAST ? FIRST : latest + 1;
	uint64_t rate = event.type == PERF_TYPE_RAW ? RAW : CYCLES;
	counters[latest] = (struct counter){ rate, event.read_format, now_ns() };
	int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
	struct seccomp_notif_addfd add = {
		.id = call->id, .flags = SECCOMP_ADDFD_FLAG_SETFD, .srcfd = null, .newfd = latest, .newfd_flags = O_CLOEXEC,
	};
	int added = ioctl(listener, SECCOMP_IOCTL_NOTIF_ADDFD, &add);
	int error = errno;
	close(null);
	return added < 0 ? -error : added;
}

/* The number of bytes that read(2) returns, or a negative errno. */
static int64_t read_counter(const struct seccomp_notif *call)
{
	const struct counter *counter = &counters[call->data.args[0]];
	uint64_t since = now_ns() - counter->opened_ns, words[4], count = 0;
	words[count++] = since / 1000 * counter->rate;
	if (counter->format & PERF_FORMAT_TOTAL_TIME_ENABLED)
		words[count++] = since;
	if (counter->format & PERF_FORMAT_TOTAL_TIME_RUNNING)
		words[count++] = since;
	if (counter->format & PERF_FORMAT_ID)
		words[count++] = call->data.args[0];
	if (call->data.args[2] < count * sizeof *words)
		return -ENOSPC;
	if (copy(call->pid, call->data.args[1], words, count * sizeof *words, 0))
		return -EFAULT;
	return count * sizeof *words;
}

static int64_t answer(int listener, const struct seccomp_notif *call, int refused)
{
	uint64_t id = call->data.args[0];
	switch (call->data.nr) {
	case SYS_perf_event_open:
		return refused ? -refused : open_counter(listener, call);
	case SYS_read:
		return read_counter(call);
	default:
		if ((uint32_t)call->data.args[1] == PERF_EVENT_IOC_ID)
			return copy(call->pid, call->data.args[2], &id, sizeof id, 0) ? -EFAULT : 0;
		return 0;
	}
}

static void serve(int listener, int refused)
{
	struct seccomp_notif call = { 0 };
	if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call))
		return; /* its process was killed meanwhile */
	int64_t value = answer(listener, &call, refused);
	struct seccomp_notif_resp response = {
		.id = call.id, .val = value < 0 ? 0 : value, .error = value < 0 ? (int)value : 0,
	};
	ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
}

int main(int count, char **arguments)
{
	int refused = 0, sockets[2], status;
	if (count > 3 && !strcmp(arguments[1], "--errno")) {
		refused = atoi(arguments[2]);
		arguments += 2;
		count -= 2;
	}
	if (count < 2) {
		fputs("usage: fake-counters [--errno NUMBER] COMMAND [ARGUMENT]...\n", stderr);
		return 125;
	}
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets))
		fail("socketpair");
	pid_t child = fork();
	if (child < 0)
		fail("fork");
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, 9);
		int listener = install_filter();
		send_descriptor(sockets[1], listener);
		close(listener);
		execvp(arguments[1], arguments + 1);
		fail(arguments[1]);
	}
	close(sockets[1]);
	int listener = receive_descriptor(sockets[0]), ended = syscall(SYS_pidfd_open, child, 0);
	if (ended < 0)
		fail("pidfd_open");
	struct pollfd waited[] = { { listener, POLLIN, 0 }, { ended, POLLIN, 0 } };
	while (!waited[1].revents) {
		if (poll(waited, 2, -1) < 0 && errno != EINTR)
			fail("poll");
		if (waited[0].revents & POLLIN)
			serve(listener, refused);
	}
	if (waitpid(child, &status, 0) < 0)
		fail("waitpid");
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
