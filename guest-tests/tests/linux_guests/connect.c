/* Copies its input into a socket, and the socket's data to its output: for guests and hosts without tools for AF_VSOCK.
 *
 *   connect vsock CID PORT        connect vsock-of PATH PORT    a guest's port, through its VM's Unix socket
 *   connect listen-vsock PORT     connect listen-unix PATH      accept one connection; report on stderr when ready
 */
#include <linux/vm_sockets.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static int checked(int result, const char *what) {
    if (result < 0) {
        perror(what);
        exit(1);
    }
    return result;
}

static struct sockaddr_vm vsock(unsigned cid, const char *port) {
    return (struct sockaddr_vm){.svm_family = AF_VSOCK, .svm_cid = cid, .svm_port = (unsigned)atoi(port)};
}

static struct sockaddr_un at_path(const char *path) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    strncpy(at.sun_path, path, sizeof at.sun_path - 1);
    return at;
}

static int connected(const void *to, socklen_t bytes) {
    int fd = checked(socket(((const struct sockaddr *)to)->sa_family, SOCK_STREAM, 0), "socket");
    checked(connect(fd, to, bytes), "connect");
    return fd;
}

static int accepted(const void *at, socklen_t bytes, const char *name) {
    int fd = checked(socket(((const struct sockaddr *)at)->sa_family, SOCK_STREAM, 0), "socket");
    checked(bind(fd, at, bytes), "bind");
    checked(listen(fd, 1), "listen");
    fprintf(stderr, "listens on %s\n", name);
    return checked(accept(fd, NULL, NULL), "accept");
}

/* The line that requests the port, and the one that confirms it. */
static int port_of_guest(const char *path, const char *port) {
    struct sockaddr_un to = at_path(path);
    int fd = connected(&to, sizeof to);
    char byte = 0;
    checked(dprintf(fd, "CONNECT %s\n", port), "write");
    for (const char *expected = "OK "; *expected; expected++)
        if (checked(read(fd, &byte, 1), "read") != 1 || byte != *expected) {
            fprintf(stderr, "the guest refuses port %s\n", port);
            exit(1);
        }
    while (byte != '\n' && checked(read(fd, &byte, 1), "read") == 1) continue;
    return fd;
}

static void copy(int from, int to) {
    char buffer[1 << 16];
    ssize_t bytes;
    while ((bytes = checked(read(from, buffer, sizeof buffer), "read")) > 0)
        for (ssize_t done = 0; done < bytes;) done += checked(write(to, buffer + done, bytes - done), "write");
}

int main(int count, char **words) {
    const char *how = count > 2 ? words[1] : "", *first = words[2], *second = count > 3 ? words[3] : "";
    int fd;
    if (!strcmp(how, "vsock")) {
        struct sockaddr_vm to = vsock((unsigned)atoi(first), second);
        fd = connected(&to, sizeof to);
    } else if (!strcmp(how, "listen-vsock")) {
        struct sockaddr_vm at = vsock(VMADDR_CID_ANY, first);
        fd = accepted(&at, sizeof at, first);
    } else if (!strcmp(how, "listen-unix")) {
        struct sockaddr_un at = at_path(first);
        fd = accepted(&at, sizeof at, first);
    } else if (!strcmp(how, "vsock-of")) {
        fd = port_of_guest(first, second);
    } else {
        fprintf(stderr, "say how to connect\n");
        return 2;
    }
    pid_t sender = checked(fork(), "fork");
    if (sender == 0) {
        copy(0, fd);
        checked(shutdown(fd, SHUT_WR), "shutdown");
        _exit(0);
    }
    copy(fd, 1);
    int status;
    checked(waitpid(sender, &status, 0), "wait");
    return status != 0;
}
