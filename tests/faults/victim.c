/* A process that does one thing worth watching and then waits.  VICTIM in the environment says what:
 *
 *   (nothing)           waits
 *   threads N           N threads that wait
 *   children N          N processes that wait, and end with it
 *   titles N            N processes each of which calls itself another server every second, and end with it
 *   maplock FILE        at SIGUSR1 one thread unmaps what it wrote into FILE, another one maps: with FILE on a file
 *                       system that does not answer, the first holds the mmap lock and the second wants it whole
 *   as PID [PROGRAM]    becomes, in a new process, the very PID (clone3), whose process must be gone; then PROGRAM
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/sched.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void *rest(void *nothing)
{
    for (;;)
        pause();
    return nothing;
}

static void start(void *(*work)(void *), void *with)
{
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 32768);
    int error = pthread_create(&thread, &attributes, work, with);
    if (error != 0) {
        fprintf(stderr, "pthread_create: %s\n", strerror(error));
        exit(1);
    }
}

static void have_children(long number)
{
    for (long i = 0; i < number; i++) {
        pid_t child = fork();
        if (child < 0)
            fail("fork");
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            prctl(PR_SET_NAME, "idle");
            rest(NULL);
        }
    }
}

/* Name and command line, in the room that our own arguments have. */
static void call_itself(char *room, size_t size, long number)
{
    char title[256];
    const char *form = "llama-server%c--port%c%ld%c-m%cm%ld.gguf";
    int length = snprintf(title, sizeof title, form, 0, 0, 1024 + number, 0, 0, number);
    memset(room, 0, size);
    memcpy(room, title, (size_t)length < size ? (size_t)length : size - 1);
    prctl(PR_SET_NAME, "llama-server");
}

static void have_titles(long number, char *room, size_t size)
{
    for (long i = 0; i < number; i++) {
        pid_t child = fork();
        if (child < 0)
            fail("fork");
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (long second = 0;; second++) {
                call_itself(room, size, (i + second * number) % 60000);
                sleep(1);
            }
        }
    }
}

static void *unmap(void *mapped)
{
    munmap(mapped, PAGE);
    return rest(NULL);
}

static void *map(void *nothing)
{
    (void)nothing;
    sleep(1);
    mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return rest(NULL);
}

static void hold_map_lock(const char *path)
{
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, PAGE) != 0)
        fail(path);
    char *mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        fail("mmap");
    mapped[0] = 'x';
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    int number;
    sigprocmask(SIG_BLOCK, &signals, NULL);
    puts("mapped");
    fflush(stdout);
    sigwait(&signals, &number);
    start(map, NULL);
    start(unmap, mapped);
}

static void become(pid_t pid, char *program, char **arguments)
{
    pid_t wanted[] = {pid};
    struct clone_args how = {.exit_signal = SIGCHLD, .set_tid = (uintptr_t)wanted, .set_tid_size = 1};
    long child = syscall(SYS_clone3, &how, sizeof how);
    if (child < 0)
        fail("clone3");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        unsetenv("VICTIM");
        arguments[0] = *program != '\0' ? program : arguments[0];
        if (*program != '\0' && execv(program, arguments) != 0)
            fail(program);
        return;
    }
    waitpid(child, NULL, 0);
    exit(0);
}

int main(int count, char **arguments)
{
    const char *order = getenv("VICTIM");
    char what[32] = "", with[512] = "", program[512] = "";
    if (order != NULL)
        sscanf(order, "%31s %511s %511s", what, with, program);
    if (strcmp(what, "threads") == 0)
        for (long i = atol(with); i > 0; i--)
            start(rest, NULL);
    else if (strcmp(what, "children") == 0)
        have_children(atol(with));
    else if (strcmp(what, "titles") == 0)
        have_titles(atol(with), *arguments, (size_t)(arguments[count - 1] - *arguments) + strlen(arguments[count - 1]));
    else if (strcmp(what, "maplock") == 0)
        hold_map_lock(with);
    else if (strcmp(what, "as") == 0)
        become(atoi(with), program, arguments);
    rest(NULL);
    return 0;
}
