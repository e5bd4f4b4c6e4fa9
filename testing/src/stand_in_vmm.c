/*
 * Stands in for a VMM that cannot be installed here: it has a VM of KVM, RAM as that VMM maps it, and a handler of
 * userfaultfd(2) that provides RAM page by page, as for a guest that is restored on demand. Its guest is a thread that
 * checks every word of the pages it visits and writes them anew.
 *
 * WIDELEAF_STAND_IN=RAM,MIB,FAULTS   RAM: anonymous, or the name of a memfd; FAULTS: none, missing, wp, minor, or child
 * (missing, and only a child process has the descriptor). Its arguments are not read. Commands, a line each:
 *
 *	visit A B     the guest visits pages A to B again and again; answers after it has seen all of them
 *	provide A B   pages A to B are provided, those that exist already are left as they are
 *	drop A B      pages A to B, which the guest does not visit, are given back
 *	protect A B   writes to pages A to B are reported, and then permitted
 *	faults        number of faults answered so far
 *	open          a userfaultfd for the RAM, where it began with none
 *	close         the userfaultfd is closed
 *
 * It ends when its standard input does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, HUGE = 2 << 20, SECONDS_MAX = 300 };

static uint64_t *ram;
static uint64_t pages;
static uint64_t *written; /* how often the guest has written each page */
static int uffd = -1;
static int is_minor;
static int memfd = -1;
static uint64_t *of_file; /* second mapping of the memfd, by which it is filled */
static _Atomic uint64_t *faults; /* shared with the child */
static pthread_t handler;
static _Atomic int handler_stops;
static _Atomic uint64_t visit_from, visit_to, visits;
static _Atomic int64_t wrong = -1;

static void die(const char *what)
{
	printf("cannot %s: %s\n", what, strerror(errno));
	fflush(stdout);
	exit(1);
}

static uint64_t image(uint64_t page, uint64_t word)
{
	return (page * WORDS + word) * 0x9e3779b97f4a7c15u;
}

/* The page of the image, once; EEXIST where it is there. */
static void provide(uint64_t page)
{
	uint64_t buffer[WORDS] __attribute__((aligned(PAGE)));
	for (uint64_t word = 0; word < WORDS; word++)
		buffer[word] = image(page, word);
	uint64_t at = (uint64_t)(uintptr_t)(ram + page * WORDS);
	struct uffdio_copy copy = { .dst = at, .src = (uintptr_t)buffer, .len = PAGE };
	struct uffdio_continue go_on = { .range = { .start = at, .len = PAGE } };
	int failed;
	do
		failed = is_minor ? ioctl(uffd, UFFDIO_CONTINUE, &go_on) : ioctl(uffd, UFFDIO_COPY, &copy);
	while (failed && errno == EAGAIN);
	if (failed && errno == EEXIST) {
		struct uffdio_range range = { .start = at, .len = PAGE };
		ioctl(uffd, UFFDIO_WAKE, &range);
	} else if (failed)
		die("provide a page");
}

static void protect(uint64_t from, uint64_t to, int is_on)
{
	struct uffdio_writeprotect change = {
		.range = { .start = (uintptr_t)(ram + from * WORDS), .len = (to - from) * PAGE },
		.mode = is_on ? UFFDIO_WRITEPROTECT_MODE_WP : 0,
	};
	if (ioctl(uffd, UFFDIO_WRITEPROTECT, &change))
		die("protect pages");
}

static void *handle(void *unused)
{
	while (!handler_stops) {
		struct pollfd ready = { .fd = uffd, .events = POLLIN };
		struct uffd_msg message;
		if (poll(&ready, 1, 20) <= 0 || read(uffd, &message, sizeof message) != sizeof message)
			continue;
		if (message.event != UFFD_EVENT_PAGEFAULT)
			continue;
		uint64_t page = (message.arg.pagefault.address - (uintptr_t)ram) / PAGE;
		if (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP)
			protect(page, page + 1, 0);
		else
			provide(page);
		++*faults;
	}
	return unused;
}

static void *guest(void *unused)
{
	for (;; ++visits) {
		uint64_t from = visit_from, to = visit_to;
		if (from == to)
			usleep(1000);
		for (uint64_t page = from; page < to; page++) {
			volatile uint64_t *words = ram + page * WORDS;
			for (uint64_t word = 0; word < WORDS; word++) {
				if (words[word] != image(page, word) + written[page])
					wrong = page;
				words[word] = image(page, word) + written[page] + 1;
			}
			++written[page];
		}
	}
	return unused;
}

static void watch(const char *mode)
{
	uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	is_minor = !strcmp(mode, "minor");
	struct uffdio_api api = { .api = UFFD_API, .features = is_minor ? UFFD_FEATURE_MINOR_SHMEM : 0 };
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api))
		die("open a userfaultfd");
	struct uffdio_register all = { .range = { .start = (uintptr_t)ram, .len = pages * PAGE } };
	all.mode = is_minor ? UFFDIO_REGISTER_MODE_MINOR : UFFDIO_REGISTER_MODE_MISSING;
	if (!strcmp(mode, "wp"))
		all.mode |= UFFDIO_REGISTER_MODE_WP;
	if (ioctl(uffd, UFFDIO_REGISTER, &all))
		die("register RAM");
	if (!strcmp(mode, "child")) {
		pid_t parent = getpid();
		if (!fork()) {
			/* Nothing of the VM's stays open here. */
			for (int fd = 3; fd < 64; fd++)
				if (fd != uffd)
					close(fd);
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (getppid() == parent)
				handle(NULL);
			_exit(0);
		}
		close(uffd);
		uffd = -1;
	} else if (pthread_create(&handler, NULL, handle, NULL))
		die("start the handler");
}

static void unwatch(void)
{
	handler_stops = 1;
	pthread_join(handler, NULL);
	close(uffd);
	uffd = -1;
	handler_stops = 0;
}

static void map(const char *kind)
{
	uint64_t bytes = pages * PAGE;
	char *hole = mmap(NULL, bytes + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *at = (char *)(((uintptr_t)hole + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
	int flags = MAP_FIXED | MAP_NORESERVE;
	if (strcmp(kind, "anonymous")) {
		memfd = memfd_create(kind, MFD_CLOEXEC);
		if (memfd < 0 || ftruncate(memfd, bytes))
			die("make a memfd");
		of_file = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
		flags |= MAP_SHARED;
	} else
		flags |= MAP_PRIVATE | MAP_ANONYMOUS;
	ram = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, memfd, 0);
	if (hole == MAP_FAILED || ram == MAP_FAILED)
		die("map RAM");
	if (at > hole)
		munmap(hole, at - hole);
	munmap(at + bytes, hole + HUGE - at);
}

int main(void)
{
	char kind[64], mode[16];
	unsigned mib;
	const char *setup = getenv("WIDELEAF_STAND_IN");
	if (!setup || sscanf(setup, "%63[^,],%u,%15s", kind, &mib, mode) != 3)
		die("read WIDELEAF_STAND_IN");
	alarm(SECONDS_MAX);
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	int vm = kvm < 0 ? -1 : ioctl(kvm, KVM_CREATE_VM, 0);
	if (vm < 0)
		die("create a VM");
	pages = (uint64_t)mib * (1 << 20) / PAGE;
	faults = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	written = calloc(pages, sizeof *written);
	map(kind);
	int is_watched = strcmp(mode, "none");
	/* A minor fault finds its page in the file. */
	if (!is_watched || !strcmp(mode, "minor"))
		for (uint64_t word = 0; word < pages * WORDS; word++)
			(of_file ? of_file : ram)[word] = image(word / WORDS, word % WORDS);
	if (of_file)
		munmap(of_file, pages * PAGE);
	if (is_watched)
		watch(mode);
	pthread_t thread;
	if (pthread_create(&thread, NULL, guest, NULL))
		die("start the guest");
	printf("ready %p\n", (void *)ram);
	fflush(stdout);
	char line[128];
	while (fgets(line, sizeof line, stdin)) {
		char command[16] = "";
		unsigned long from = 0, to = 0;
		sscanf(line, "%15s %lu %lu", command, &from, &to);
		if (!strcmp(command, "visit")) {
			visit_from = from;
			visit_to = to;
			for (uint64_t until = visits + 2; visits < until && wrong < 0;)
				usleep(100);
		} else if (!strcmp(command, "provide"))
			for (uint64_t page = from; page < to; page++)
				provide(page);
		else if (!strcmp(command, "drop")) {
			madvise(ram + from * WORDS, (to - from) * PAGE, MADV_DONTNEED);
			memset(written + from, 0, (to - from) * sizeof *written);
		} else if (!strcmp(command, "protect"))
			protect(from, to, 1);
		else if (!strcmp(command, "open"))
			watch("wp");
		else if (!strcmp(command, "close"))
			unwatch();
		if (wrong >= 0)
			printf("wrong page %ld\n", (long)wrong);
		else
			printf("ok %lu\n", (unsigned long)*faults);
		fflush(stdout);
	}
	_exit(0);
}
