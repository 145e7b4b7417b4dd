/* Faults of a disk on demand: preloaded, it fails chosen system calls on files under a prefix.
 *
 * A fault begins at the n-th call of one operation by the thread that armed it. "Once" fails that
 * call only. A longer outage fails every writing operation of all threads until it is over. The
 * library can also shift the clock of the day, as on a machine whose clock is wrong.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, WRITE, FSYNC, RENAME, MKDIR, LOCK, SHORT, OPERATIONS };

static char prefix[4096];
static int operation = -1, error_number, thread;
static long nth, failures_left, counts[OPERATIONS], hits, clock_shift;
static int counting;

void faults_arm(const char *under, int which, long n, int error, long failures) {
    strncpy(prefix, under, sizeof prefix - 1);
    operation = which, nth = n, error_number = error, failures_left = failures;
    memset(counts, 0, sizeof counts);
    hits = 0, thread = (int)syscall(SYS_gettid), counting = 1;
}
void faults_disarm(void) { counting = 0; }
long faults_count(int which) { return counts[which]; }
long faults_hits(void) { return hits; }
void faults_shift_clock(long seconds) { clock_shift = seconds; }

static int fail(void) {
    hits++, failures_left -= failures_left > 0;
    errno = error_number;
    return 1;
}

static int in_outage(int which) {
    if (hits == 0 || failures_left == 0) return 0;
    return operation == LOCK ? which == LOCK : which != LOCK && which != SHORT;
}

/* Return whether this call is to fail. */
static int fails(int which, const char *path) {
    if (!counting || path == NULL || strncmp(path, prefix, strlen(prefix)) != 0) return 0;
    if (in_outage(which)) return fail();
    /* Written once a second, for display only: it would make the count depend on time. */
    if (strstr(path, "progress.json") != NULL) return 0;
    if ((int)syscall(SYS_gettid) != thread) return 0;
    counts[which]++;
    return hits == 0 && which == operation && counts[which] == nth ? fail() : 0;
}

static const char *path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length < 0) return NULL;
    path[length] = 0;
    return path;
}
static int fails_fd(int which, int fd) {
    char path[4096];
    return counting && fails(which, path_of(fd, path, sizeof path));
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT))
#define MODE(flags, last)                                \
    mode_t mode = 0;                                     \
    if ((flags) & (O_CREAT | O_TMPFILE)) {               \
        va_list list;                                    \
        va_start(list, last);                            \
        mode = va_arg(list, mode_t);                     \
        va_end(list);                                    \
    }

int open(const char *path, int flags, ...) {
    MODE(flags, flags)
    return WRITES(flags) && fails(OPEN, path) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags, flags)
    return WRITES(flags) && fails(OPEN, path) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int at, const char *path, int flags, ...) {
    MODE(flags, flags)
    return WRITES(flags) && fails(OPEN, path) ? -1 : REAL(openat)(at, path, flags, mode);
}
ssize_t write(int fd, const void *data, size_t size) {
    if (fails_fd(WRITE, fd)) return -1;
    if (size > 1 && fails_fd(SHORT, fd)) size /= 2;
    return REAL(write)(fd, data, size);
}
int fsync(int fd) { return fails_fd(FSYNC, fd) ? -1 : REAL(fsync)(fd); }
int rename(const char *old, const char *new) {
    return fails(RENAME, old) ? -1 : REAL(rename)(old, new);
}
int mkdir(const char *path, mode_t mode) {
    return fails(MKDIR, path) ? -1 : REAL(mkdir)(path, mode);
}
static int lock_or(int (*real)(int, int, ...), int fd, int command, void *argument) {
    if ((command == F_SETLK || command == F_SETLKW) && fails_fd(LOCK, fd)) return -1;
    return real(fd, command, argument);
}
int fcntl(int fd, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    return lock_or(REAL(fcntl), fd, command, argument);
}
int fcntl64(int fd, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    return lock_or(REAL(fcntl64), fd, command, argument);
}
int clock_gettime(clockid_t which, struct timespec *now) {
    int result = REAL(clock_gettime)(which, now);
    if (result == 0 && which == CLOCK_REALTIME) now->tv_sec += clock_shift;
    return result;
}
