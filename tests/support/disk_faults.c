/* A disk that fails as configured: preloaded into a process, it wraps the C library's calls.
 *
 * SDK_DISK_FAULTS names a file of rules, read at every call, so they change while the process runs.
 * A rule is one line: KIND ARGUMENT PERCENT OPERATION PREFIX
 *   KIND       error (ARGUMENT is errno), slow (ARGUMENT is milliseconds),
 *              hang (until the rule is removed), short (half of a write is done)
 *   PERCENT    the share of the calls that fail, at random
 *   OPERATION  open, read, write (truncation included), sync, delete, or any
 *   PREFIX     the beginning of the file's path
 * Only calls of the C library are seen; a mapped file (SQLite's -shm) is written without any.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { SHORT = -2 };

/* Raw system calls: what reads the rules must not meet them itself. */
static ssize_t read_rules(char *into, size_t size) {
    const char *name = getenv("SDK_DISK_FAULTS");
    if (!name) return 0;
    long fd = syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = syscall(SYS_read, fd, into, size - 1);
    syscall(SYS_close, fd);
    into[length < 0 ? 0 : length] = 0;
    return length;
}

/* Make a file beside the rules, by which the test sees that a call hangs. */
static void note_hang(void) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.hung", getenv("SDK_DISK_FAULTS"));
    long fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) syscall(SYS_close, fd);
}

/* 0: do the call. SHORT: do half of it. Else an errno. */
static int judge(const char *operation, const char *path) {
    for (;;) {
        char rules[4096], *rest = rules, *line;
        int hang = 0;
        if (read_rules(rules, sizeof rules) <= 0) return 0;
        while ((line = strsep(&rest, "\n"))) {
            char kind[16], on[16], prefix[PATH_MAX];
            int argument, percent;
            if (sscanf(line, "%15s %d %d %15s %4095[^\n]", kind, &argument, &percent, on, prefix) != 5)
                continue;
            if (strcmp(on, operation) && strcmp(on, "any")) continue;
            if (strncmp(path, prefix, strlen(prefix))) continue;
            if (percent < 100 && random() % 100 >= percent) continue;
            if (!strcmp(kind, "error")) return argument;
            if (!strcmp(kind, "short")) return SHORT;
            if (!strcmp(kind, "slow")) { usleep(argument * 1000u); return 0; }
            if (!strcmp(kind, "hang")) hang = 1;
        }
        if (!hang) return 0;
        note_hang();
        usleep(10000);
    }
}

static int judge_fd(const char *operation, int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/') return 0;
    path[length] = 0;
    return judge(operation, path);
}

static int judge_name(const char *operation, const char *name) {
    char path[PATH_MAX * 2];
    if (name[0] == '/') return judge(operation, name);
    if (!getcwd(path, PATH_MAX)) return 0;
    strncat(strcat(path, "/"), name, PATH_MAX - 2);
    return judge(operation, path);
}

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))
#define REFUSE(fault) if ((fault) > 0) { errno = (fault); return -1; }

#define ON_SYNC(name) \
    int name(int fd) { int fault = judge_fd("sync", fd); REFUSE(fault) return REAL(name)(fd); }
ON_SYNC(fsync)
ON_SYNC(fdatasync)

#define ON_TRUNCATE(name, type) \
    int name(int fd, type size) { \
        int fault = judge_fd("write", fd); REFUSE(fault) return REAL(name)(fd, size); }
ON_TRUNCATE(ftruncate, off_t)
ON_TRUNCATE(ftruncate64, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    int fault = judge_fd("write", fd);
    REFUSE(fault)
    return REAL(write)(fd, data, fault == SHORT ? (size + 1) / 2 : size);
}

#define ON_PWRITE(name, type) \
    ssize_t name(int fd, const void *data, size_t size, type at) { \
        int fault = judge_fd("write", fd); \
        REFUSE(fault) \
        return REAL(name)(fd, data, fault == SHORT ? (size + 1) / 2 : size, at); }
ON_PWRITE(pwrite, off_t)
ON_PWRITE(pwrite64, off64_t)

#define ON_PREAD(name, type) \
    ssize_t name(int fd, void *data, size_t size, type at) { \
        int fault = judge_fd("read", fd); REFUSE(fault) return REAL(name)(fd, data, size, at); }
ON_PREAD(pread, off_t)
ON_PREAD(pread64, off64_t)

#define ON_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        int fault = judge_name("open", path); \
        REFUSE(fault) \
        return REAL(name)(path, flags, mode); }
ON_OPEN(open)
ON_OPEN(open64)

int unlink(const char *path) {
    int fault = judge_name("delete", path);
    REFUSE(fault)
    return REAL(unlink)(path);
}
