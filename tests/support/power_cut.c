/* Records every write and every sync of a directory's files: preloaded into a process.
 *
 * SDK_POWER_CUT_FROM is how the paths of the files begin. The records are appended to the file
 * SDK_POWER_CUT_TO/journal, which several processes share; power_cut.py replays them up to any
 * moment. If the directory has a file "kill" when a sync has succeeded, the process is killed.
 *
 * A write is recorded under a lock that it shares with every other one, so the journal has them in
 * the order in which the page cache got them. A sync can hang, so its begin and its end are two
 * records, and nothing is locked between them. Preload this before a library of faults: what that
 * one refuses is recorded as refused.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, TRUNCATE, UNLINK, SYNC_BEGIN, SYNC_DONE, SYNC_FAILED };

struct record {
    uint32_t operation, name_length, thread, unused;
    uint64_t offset, length; /* of a truncation: the new size; of a write: its bytes follow */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

/* Raw system calls: the recorder must not record itself. */
static int journal(void) {
    static int fd = -1;
    static pid_t owner;
    char path[PATH_MAX];
    if (fd >= 0 && owner == getpid()) return fd;
    snprintf(path, sizeof path, "%s/journal", getenv("SDK_POWER_CUT_TO"));
    /* One above those that a program closes or counts. */
    int low = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    fd = fcntl(low, F_DUPFD_CLOEXEC, 200);
    if (fd < 0) fd = low; else syscall(SYS_close, low);
    owner = getpid();
    return fd;
}

static void lock(void) {
    pthread_mutex_lock(&mutex);
    while (flock(journal(), LOCK_EX) && errno == EINTR) {}
}

static void unlock(void) {
    flock(journal(), LOCK_UN);
    pthread_mutex_unlock(&mutex);
}

static void append(uint32_t operation, const char *name, off_t offset, size_t length, const void *data) {
    struct record head = {operation, strlen(name), gettid(), 0, offset, length};
    struct iovec parts[3] = {
        {&head, sizeof head}, {(void *)name, head.name_length}, {(void *)data, data ? length : 0}};
    syscall(SYS_writev, journal(), parts, data ? 3 : 2);
}

/* The last part of the path if the file is one of those that are recorded, else NULL. */
static const char *recorded(char *path) {
    const char *from = getenv("SDK_POWER_CUT_FROM");
    if (!from || !getenv("SDK_POWER_CUT_TO") || strncmp(path, from, strlen(from))) return NULL;
    return path + strlen(from);
}

static const char *name_of(int fd, char *path) {
    char link[64];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length <= 0) return NULL;
    path[length] = 0;
    const char *name = recorded(path);
    if (!name || fstat(fd, &status) || !S_ISREG(status.st_mode) || !status.st_nlink) return NULL;
    return name;
}

#define ON_SYNC(real) \
    int real(int fd) { \
        char path[PATH_MAX], kill_file[PATH_MAX]; \
        const char *name = name_of(fd, path); \
        if (!name) return REAL(real)(fd); \
        lock(); append(SYNC_BEGIN, name, 0, 0, NULL); unlock(); \
        int failed = REAL(real)(fd), error = errno; \
        lock(); append(failed ? SYNC_FAILED : SYNC_DONE, name, 0, 0, NULL); unlock(); \
        snprintf(kill_file, sizeof kill_file, "%s/kill", getenv("SDK_POWER_CUT_TO")); \
        if (!failed && !access(kill_file, F_OK)) kill(getpid(), SIGKILL); \
        errno = error; \
        return failed; }
ON_SYNC(fsync)
ON_SYNC(fdatasync)

#define ON_PWRITE(real, type) \
    ssize_t real(int fd, const void *data, size_t size, type at) { \
        char path[PATH_MAX]; \
        const char *name = name_of(fd, path); \
        if (!name) return REAL(real)(fd, data, size, at); \
        lock(); \
        ssize_t done = REAL(real)(fd, data, size, at); \
        int error = errno; \
        if (done > 0) append(WRITE, name, at, done, data); \
        unlock(); \
        errno = error; \
        return done; }
ON_PWRITE(pwrite, off_t)
ON_PWRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    const char *name = name_of(fd, path);
    if (!name) return REAL(write)(fd, data, size);
    lock();
    off_t at = fcntl(fd, F_GETFL) & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
    ssize_t done = REAL(write)(fd, data, size);
    int error = errno;
    if (done > 0) append(WRITE, name, at, done, data);
    unlock();
    errno = error;
    return done;
}

#define ON_TRUNCATE(real, type) \
    int real(int fd, type size) { \
        char path[PATH_MAX]; \
        const char *name = name_of(fd, path); \
        if (!name) return REAL(real)(fd, size); \
        lock(); \
        int failed = REAL(real)(fd, size), error = errno; \
        if (!failed) append(TRUNCATE, name, 0, size, NULL); \
        unlock(); \
        errno = error; \
        return failed; }
ON_TRUNCATE(ftruncate, off_t)
ON_TRUNCATE(ftruncate64, off64_t)

int unlink(const char *path) {
    char whole[PATH_MAX * 2] = "";
    if (path[0] != '/' && getcwd(whole, PATH_MAX)) strcat(whole, "/");
    strncat(whole, path, PATH_MAX - 1);
    const char *name = recorded(whole);
    if (!name) return REAL(unlink)(path);
    lock();
    int failed = REAL(unlink)(path), error = errno;
    if (!failed) append(UNLINK, name, 0, 0, NULL);
    unlock();
    errno = error;
    return failed;
}
