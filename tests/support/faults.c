/* Faults of a disk on demand: preloaded, it fails chosen system calls on files under a prefix.
 *
 * A fault begins at the n-th call of one operation by a thread or a process that is counted. "Once"
 * fails that call only. A longer outage fails every writing operation until it is over, of all
 * threads and of all processes that were forked since `faults_share`. The library can also shift the
 * clock of the day, or make it jump, as on a machine whose clock is wrong; FAULTS_CLOCK in the
 * environment gives each process another one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, WRITE, FSYNC, RENAME, MKDIR, LOCK, SHORT, OPERATIONS };

typedef struct {
    char prefix[4096];
    int operation, error_number, counting;
    int counted; /* a thread, or a process if negative */
    long nth, failures_left, counts[OPERATIONS], hits;
} State;

static State own, *state = &own;
static long clock_shift, clock_every, clock_calls;

void faults_share(void) {
    void *memory =
        mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) state = memory;
}
void faults_arm(const char *under, int which, long n, int error, long failures) {
    memset(state, 0, sizeof *state);
    strncpy(state->prefix, under, sizeof state->prefix - 1);
    state->operation = which, state->nth = n, state->error_number = error;
    state->failures_left = failures, state->counting = 1;
}
void faults_count_this_thread(void) { state->counted = (int)syscall(SYS_gettid); }
void faults_count_this_process(void) { state->counted = -(int)getpid(); }
void faults_disarm(void) { state->counting = 0; }
long faults_count(int which) { return state->counts[which]; }
long faults_hits(void) { return state->hits; }
/* Shift the clock; if `every` is not 0, it jumps there and back after so many looks at it. */
void faults_shift_clock(long seconds, long every) { clock_shift = seconds, clock_every = every; }

__attribute__((constructor)) static void clock_of_this_process(void) {
    const char *seconds = getenv("FAULTS_CLOCK");
    if (seconds != NULL) faults_shift_clock(atol(seconds) * (getpid() % 3 - 1), 0);
}

static int fail(void) {
    __atomic_add_fetch(&state->hits, 1, __ATOMIC_SEQ_CST);
    if (state->failures_left > 0) state->failures_left--;
    errno = state->error_number;
    return 1;
}

static int in_outage(int which) {
    if (state->hits == 0 || state->failures_left == 0) return 0;
    return state->operation == LOCK ? which == LOCK : which != LOCK && which != SHORT;
}

/* Return whether this call is to fail. */
static int fails(int which, const char *path) {
    if (!state->counting || path == NULL) return 0;
    if (strncmp(path, state->prefix, strlen(state->prefix)) != 0) return 0;
    if (in_outage(which)) return fail();
    /* Written once a second, for display only: it would make the count depend on time. */
    if (strstr(path, "progress.json") != NULL) return 0;
    if (state->counted != (int)syscall(SYS_gettid) && state->counted != -(int)getpid()) return 0;
    state->counts[which]++;
    if (state->hits || which != state->operation || state->counts[which] != state->nth) return 0;
    return fail();
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
    return state->counting && fails(which, path_of(fd, path, sizeof path));
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
static long shift_now(void) {
    if (clock_every == 0) return clock_shift;
    return clock_calls++ / clock_every % 2 ? clock_shift : 0;
}
int clock_gettime(clockid_t which, struct timespec *now) {
    int result = REAL(clock_gettime)(which, now);
    if (result == 0 && which == CLOCK_REALTIME) now->tv_sec += shift_now();
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = REAL(gettimeofday)(now, zone);
    if (result == 0) now->tv_sec += shift_now();
    return result;
}
time_t time(time_t *kept) {
    time_t now = REAL(time)(NULL) + shift_now();
    if (kept != NULL) *kept = now;
    return now;
}
