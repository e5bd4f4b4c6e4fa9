/* Fills memory with pages of one size, and uses it until it is killed:
 *
 *   pages base MIB | pages huge MIB
 *
 * Before that it prints `guest: pages SIZE AnonHugePages KIB windows NUMBER`: the sum in its own /proc/self/smaps, and
 * the number of 2 MiB windows of physical memory that its pages lie in (/proc/self/pagemap; proc(5)).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define WINDOW ((size_t)2 << 20)
#define PAGE ((size_t)4096)
/* A bit a window: enough for 16 GiB of physical memory. */
static unsigned char seen[8192];

static void must(int holds, const char *what) {
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static unsigned long anon_huge_kib(void) {
    unsigned long sum = 0, kib;
    char line[256];
    FILE *smaps = fopen("/proc/self/smaps", "r");
    must(smaps != NULL, "smaps");
    while (fgets(line, sizeof line, smaps))
        if (sscanf(line, "AnonHugePages: %lu kB", &kib) == 1) sum += kib;
    fclose(smaps);
    return sum;
}

static unsigned long windows_of(const char *start, size_t bytes) {
    int pagemap = open("/proc/self/pagemap", O_RDONLY);
    must(pagemap >= 0, "pagemap");
    unsigned long count = 0;
    for (size_t page = 0; page < bytes / PAGE; page++) {
        uint64_t entry;
        off_t at = (off_t)(((uintptr_t)start / PAGE + page) * sizeof entry);
        must(pread(pagemap, &entry, sizeof entry, at) == sizeof entry && entry >> 63, "a page that is present");
        size_t window = (size_t)((entry & (((uint64_t)1 << 55) - 1)) * PAGE / WINDOW);
        must(window < sizeof seen, "a window");
        count += !seen[window];
        seen[window] = 1;
    }
    close(pagemap);
    return count;
}

int main(int count, char **arguments) {
    must(count == 3, "pages base|huge MIB");
    int is_huge = !strcmp(arguments[1], "huge");
    size_t bytes = (size_t)atoi(arguments[2]) << 20;
    char *all = mmap(NULL, bytes + WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(all != MAP_FAILED, "mmap");
    char *start = (char *)(((uintptr_t)all + WINDOW - 1) & ~(WINDOW - 1));
    must(!madvise(all, bytes + WINDOW, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE), "madvise");
    memset(start, 1, bytes);
    printf("guest: pages %s AnonHugePages %lu windows %lu\n", arguments[1], anon_huge_kib(), windows_of(start, bytes));
    fflush(stdout);
    for (;;)
        for (size_t page = 0; page < bytes; page += PAGE) ((volatile char *)start)[page]++;
}
