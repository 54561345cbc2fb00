/* LD_PRELOAD: clocks that can be made to jump.  CLOCK_SHIM names a file of two 64-bit numbers: nanoseconds that are added
 * to the wall clock and to the monotonic clock.  Waits until a moment of the monotonic clock are made to end when the
 * caller expects it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000LL

static volatile int64_t *offsets;

__attribute__((constructor)) static void map_offsets(void)
{
    const char *path = getenv("CLOCK_SHIM");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *mapped = mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        offsets = mapped;
}

static int64_t offset_of(clockid_t clock)
{
    if (offsets == NULL)
        return 0;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        return offsets[0];
    return clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE || clock == CLOCK_BOOTTIME ? offsets[1] : 0;
}

static struct timespec moved(struct timespec at, int64_t by)
{
    int64_t nanoseconds = at.tv_sec * BILLION + at.tv_nsec + by;
    if (nanoseconds < 0)
        nanoseconds = 0;
    return (struct timespec){.tv_sec = nanoseconds / BILLION, .tv_nsec = nanoseconds % BILLION};
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int status = syscall(SYS_clock_gettime, clock, now);
    if (status == 0)
        *now = moved(*now, offset_of(clock));
    return status;
}

time_t time(time_t *now)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now != NULL)
        *now = at.tv_sec;
    return at.tv_sec;
}

int gettimeofday(struct timeval *now, void *zone)
{
    (void)zone;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    *now = (struct timeval){.tv_sec = at.tv_sec, .tv_usec = at.tv_nsec / 1000};
    return 0;
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *until)
{
    static int (*wait)(sem_t *, clockid_t, const struct timespec *);
    if (wait == NULL)
        wait = (int (*)(sem_t *, clockid_t, const struct timespec *))dlsym(RTLD_NEXT, "sem_clockwait");
    struct timespec really = moved(*until, -offset_of(clock));
    return wait(semaphore, clock, &really);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until)
{
    return sem_clockwait(semaphore, CLOCK_REALTIME, until);
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *lock, clockid_t clock, const struct timespec *until)
{
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (wait == NULL)
        wait = (int (*)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *))dlsym(
            RTLD_NEXT, "pthread_cond_clockwait");
    struct timespec really = moved(*until, -offset_of(clock));
    return wait(condition, lock, clock, &really);
}

/* Python's conditions are of the monotonic clock. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock, const struct timespec *until)
{
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (wait == NULL)
        wait = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlsym(
            RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec really = moved(*until, -offset_of(CLOCK_MONOTONIC));
    return wait(condition, lock, &really);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *request, struct timespec *left)
{
    struct timespec really = (flags & TIMER_ABSTIME) ? moved(*request, -offset_of(clock)) : *request;
    return syscall(SYS_clock_nanosleep, clock, flags, &really, left) == 0 ? 0 : errno;
}
