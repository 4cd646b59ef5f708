/* Writes to the file FUZZ_SPY_LOG what a process that is started with this library in LD_PRELOAD
   does: calls about a path or a name that contains "mmcanary", all names that it looks up, and all
   addresses that it connects to. One line each: the call, a tab, what it is about. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void tell(const char *call, const char *about) {
    const char *log = getenv("FUZZ_SPY_LOG");
    char line[1024];
    int length = snprintf(line, sizeof line, "%s\t%.900s\n", call, about);
    const int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC;
    int file = log ? syscall(SYS_openat, AT_FDCWD, log, flags, 0600) : -1;
    if (file < 0)
        return;
    if (write(file, line, length) != length)
        abort(); /* a witness that misses something is none */
    close(file);
}

static void look(const char *call, const char *path) {
    if (path && strstr(path, "mmcanary"))
        tell(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...) {                                                   \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        int mode = va_arg(rest, int);                                                              \
        va_end(rest);                                                                              \
        look(#name, path);                                                                         \
        return REAL(name)(path, flags, mode);                                                      \
    }
#define OPENAT(name)                                                                               \
    int name(int directory, const char *path, int flags, ...) {                                    \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        int mode = va_arg(rest, int);                                                              \
        va_end(rest);                                                                              \
        look(#name, path);                                                                         \
        return REAL(name)(directory, path, flags, mode);                                           \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define CALL(type, name, path, parameters, arguments)                                              \
    type name parameters {                                                                         \
        look(#name, path);                                                                         \
        return REAL(name) arguments;                                                               \
    }
CALL(FILE *, fopen, path, (const char *path, const char *mode), (path, mode))
CALL(FILE *, fopen64, path, (const char *path, const char *mode), (path, mode))
CALL(int, stat, path, (const char *path, struct stat *found), (path, found))
CALL(int, lstat, path, (const char *path, struct stat *found), (path, found))
CALL(int, stat64, path, (const char *path, struct stat64 *found), (path, found))
CALL(int, lstat64, path, (const char *path, struct stat64 *found), (path, found))
CALL(int, fstatat, path, (int at, const char *path, struct stat *found, int flags), (at, path, found, flags))
CALL(int, fstatat64, path, (int at, const char *path, struct stat64 *found, int flags), (at, path, found, flags))
CALL(int, statx, path, (int at, const char *path, int flags, unsigned mask, struct statx *found), (at, path, flags, mask, found))
CALL(int, access, path, (const char *path, int mode), (path, mode))
CALL(int, faccessat, path, (int at, const char *path, int mode, int flags), (at, path, mode, flags))
CALL(DIR *, opendir, path, (const char *path), (path))
CALL(ssize_t, readlink, path, (const char *path, char *to, size_t size), (path, to, size))
CALL(ssize_t, readlinkat, path, (int at, const char *path, char *to, size_t size), (at, path, to, size))
CALL(int, execve, path, (const char *path, char *const arguments[], char *const variables[]), (path, arguments, variables))
CALL(int, execv, path, (const char *path, char *const arguments[]), (path, arguments))
CALL(int, posix_spawn, path, (pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes, char *const arguments[], char *const variables[]), (pid, path, actions, attributes, arguments, variables))

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    if (name)
        tell("getaddrinfo", name);
    return REAL(getaddrinfo)(name, service, hints, found);
}

int connect(int descriptor, const struct sockaddr *address, socklen_t length) {
    char host[INET6_ADDRSTRLEN] = "", about[INET6_ADDRSTRLEN + 16];
    unsigned port = 0;
    if (address && address->sa_family == AF_INET) {
        const struct sockaddr_in *four = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &four->sin_addr, host, sizeof host);
        port = ntohs(four->sin_port);
    } else if (address && address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)address;
        inet_ntop(AF_INET6, &six->sin6_addr, host, sizeof host);
        port = ntohs(six->sin6_port);
    }
    if (port) {
        snprintf(about, sizeof about, "%s %u", host, port);
        tell("connect", about);
    }
    return REAL(connect)(descriptor, address, length);
}
