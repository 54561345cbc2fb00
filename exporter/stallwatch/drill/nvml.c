/* Stand-in libnvidia-ml.so.1: NVML as a monitor sees it, without a GPU, steered by a text file.
 *
 * $NVML_STANDIN_STATE names the file.  It is looked at (one stat) in every call and read again when it was
 * replaced, so a running process sees a change at its next call.  One "KEY VALUE" per line, '#' starts a comment:
 *
 *   count 8                      driver 580.95.05           epoch 2        access lost
 *   3.power_mw 300000            *.util_gpu 97              3:1.instance 9/0
 *   3.nvmlDeviceGetPowerUsage ret:15        *.nvmlDeviceGetCount_v2 delay:300      3.* hang
 *
 * "3." is card 3, "3:1." the MIG instance 1 of it, "*." or nothing every card.  An instance takes no value from its
 * card.  A key stands once.  "none" as a value is NOT_SUPPORTED.  What there is, with defaults: see the tables and
 * functions below; nvml_standin.py writes the file.
 *
 * The structures follow the binary interface that the Python binding `pynvml` declares; nothing of NVIDIA's header
 * is copied.  A test's device, not a model of a card: it answers what it is told. */
#define _GNU_SOURCE
#include <ctype.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define LENGTH(array) (sizeof(array) / sizeof *(array))

typedef unsigned int Uint;
typedef unsigned long long Ull;
typedef Uint Code;

enum {
    CARDS = 16,
    INSTANCES = 8,
    PROCESSES = 64,
    ALL = -1,                      /* the card of a key that holds for every card */
    NONE = -1,                     /* the instance of a card that is no instance */
    RECHECK_MS = 20,               /* how soon a hung call notices that it may go on */
    HANG_LIMIT_MS = 30 * 60 * 1000, /* no hang outlives a forgotten test by more */
    PCIE_THROUGHPUT_MS = 20,       /* the real call measures for this long */
};

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

typedef struct {
    int card, mig;
} Device;

/* A handle is the address of a cell: column 0 is the card, the others are its MIG instances. */
static Device devices[CARDS][1 + INSTANCES];

/* ---- time ---- */

/* Seconds of CLOCK_MONOTONIC: the same in every process, so that two of them see the same counters. */
static double monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void nap(Ull milliseconds) {
    struct timespec left = {(time_t)(milliseconds / 1000), (long)(milliseconds % 1000) * 1000000L};
    while (nanosleep(&left, &left) != 0) {
    }
}

/* ---- the state file ---- */

typedef struct {
    const char *key, *value;
    int card, mig;
} Entry;

typedef struct {
    struct stat seen; /* of the file that the rest was read from; zeros: there was none */
    char *text;
    Entry *entries; /* sorted, for bsearch */
    size_t length;
    bool faults; /* whether any key is a call: most calls then need no look-up */
} State;

/* One per thread, so that no call holds a lock: a hung call must not block the others. */
static _Thread_local State state;
static const char *state_path = "";

static int compare(const void *left, const void *right) {
    const Entry *a = left, *b = right;
    int by_key = strcmp(a->key, b->key);
    if (by_key != 0) {
        return by_key;
    }
    return a->card != b->card ? a->card - b->card : a->mig - b->mig;
}

static const char *find(const char *key, int card, int mig) {
    const Entry wanted = {key, NULL, card, mig};
    if (state.length == 0) {
        return NULL;
    }
    const Entry *found = bsearch(&wanted, state.entries, state.length, sizeof wanted, compare);
    return found ? found->value : NULL;
}

/* "3:1.name" is card 3, instance 1, key "name"; "*.name" and "name" are for all. */
static Entry parse_key(char *word) {
    Entry entry = {word, NULL, ALL, NONE};
    if (strncmp(word, "*.", 2) == 0) {
        entry.key = word + 2;
    } else if (isdigit((unsigned char)*word)) {
        char *end;
        entry.card = (int)strtol(word, &end, 10);
        if (*end == ':') {
            entry.mig = (int)strtol(end + 1, &end, 10);
        }
        entry.key = *end == '.' ? end + 1 : end;
    }
    return entry;
}

static bool is_call(const char *key) { return strncmp(key, "nvml", 4) == 0 || strcmp(key, "*") == 0; }

static void parse_line(char *line) {
    char *value = strchr(line, ' ');
    if (*line == '#' || !value) {
        return;
    }
    *value++ = '\0';
    Entry entry = parse_key(line);
    entry.value = value + strspn(value, " ");
    state.entries[state.length++] = entry;
    state.faults = state.faults || is_call(entry.key);
}

static void parse(char *text) {
    size_t lines = 1;
    for (const char *at = text; (at = strchr(at, '\n')); at++) {
        lines++;
    }
    free(state.entries);
    state.entries = calloc(lines, sizeof *state.entries);
    state.length = 0;
    state.faults = false;
    for (char *rest = text, *line; state.entries && (line = strsep(&rest, "\n"));) {
        parse_line(line);
    }
    if (state.length != 0) {
        qsort(state.entries, state.length, sizeof *state.entries, compare);
    }
}

/* The file's text, to be freed, and which file it was; NULL and zeros when there is none. */
static char *read_state(struct stat *file) {
    memset(file, 0, sizeof *file);
    int descriptor = open(state_path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        return NULL;
    }
    char *text = fstat(descriptor, file) == 0 ? malloc((size_t)file->st_size + 1) : NULL;
    if (text) {
        ssize_t length = read(descriptor, text, (size_t)file->st_size);
        text[length > 0 ? length : 0] = '\0';
    }
    close(descriptor);
    return text;
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void refresh(void) {
    struct stat now;
    if (stat(state_path, &now) != 0) {
        memset(&now, 0, sizeof now);
    }
    if (same_file(&now, &state.seen)) {
        return;
    }
    char *text = read_state(&state.seen);
    char empty[] = "";
    parse(text ? text : empty);
    if (!text) {
        state.length = 0; /* nothing may point into `empty` */
    }
    free(state.text);
    state.text = text;
}

/* ---- values ---- */

static const char *value(const Device *device, const char *key) {
    if (device && device->mig != NONE) {
        return find(key, device->card, device->mig);
    }
    const char *own = device ? find(key, device->card, NONE) : NULL;
    return own ? own : find(key, ALL, NONE);
}

static Code number(const Device *device, const char *key, Ull fallback, Ull *out) {
    const char *text = value(device, key);
    if (text && strcmp(text, "none") == 0) {
        return NOT_SUPPORTED;
    }
    *out = text ? strtoull(text, NULL, 0) : fallback;
    return SUCCESS;
}

static Ull number_or(const Device *device, const char *key, Ull fallback) {
    Ull out = fallback;
    return number(device, key, fallback, &out) == SUCCESS ? out : fallback;
}

static Code number32(const Device *device, const char *key, Ull fallback, Uint *out) {
    Ull wide = 0;
    Code code = number(device, key, fallback, &wide);
    *out = (Uint)wide;
    return code;
}

static Code copy(const char *text, char *out, Uint size) {
    if (strcmp(text, "none") == 0) {
        return NOT_SUPPORTED;
    }
    if (strlen(text) >= size) {
        return INSUFFICIENT_SIZE;
    }
    memcpy(out, text, strlen(text) + 1);
    return SUCCESS;
}

/* Counters that go on by themselves: value = base + rate x (now - since).
 * "N" stands still, "N@S" was N at monotonic second S, "auto" (the default) is 0@0. */
typedef enum { ENERGY, PCIE_TX, PCIE_RX, NVLINK_TX, NVLINK_RX, COUNTERS } CounterId;

static const struct {
    const char *key, *rate;
    Ull default_rate;
} counters[COUNTERS] = {
    [ENERGY] = {"energy_mj", "power_mw", 70000}, /* milliwatts are millijoules a second */
    [PCIE_TX] = {"pcie_tx_bytes", "pcie_tx_per_second", 0},
    [PCIE_RX] = {"pcie_rx_bytes", "pcie_rx_per_second", 0},
    [NVLINK_TX] = {"nvlink_tx_bytes", "nvlink_tx_per_second", 0},
    [NVLINK_RX] = {"nvlink_rx_bytes", "nvlink_rx_per_second", 0},
};

static Code counter(const Device *device, CounterId id, Ull *out) {
    const char *text = value(device, counters[id].key);
    char *end = NULL;
    if (text && strcmp(text, "none") == 0) {
        return NOT_SUPPORTED;
    }
    Ull base = text && strcmp(text, "auto") != 0 ? strtoull(text, &end, 0) : 0;
    *out = base;
    if (end && *end != '@') {
        return SUCCESS;
    }
    double since = end ? strtod(end + 1, NULL) : 0;
    double rate = (double)number_or(device, counters[id].rate, counters[id].default_rate);
    *out += (Ull)(rate * (monotonic() - since));
    return SUCCESS;
}

/* ---- what every call passes through ---- */

static int initialised;
static Ull loaded_epoch, loaded_resets[CARDS];

/* What is loaded belongs to the driver of this moment: a later one is met by a new process only. */
__attribute__((constructor)) static void load(void) {
    const char *path = getenv("NVML_STANDIN_STATE");
    state_path = path ? strdup(path) : "";
    refresh();
    loaded_epoch = number_or(NULL, "epoch", 0);
    for (int card = 0; card < CARDS; card++) {
        devices[card][0] = (Device){card, NONE};
        loaded_resets[card] = number_or(&devices[card][0], "resets", 0);
        for (int mig = 0; mig < INSTANCES; mig++) {
            devices[card][1 + mig] = (Device){card, mig};
        }
    }
}

static Uint count(void) {
    Ull cards = number_or(NULL, "count", 1);
    return cards < CARDS ? (Uint)cards : CARDS;
}

/* "PID CALL CARD" into the file that "count_calls" names, before anything can block or fail. */
static void note_call(const char *call, const Device *device) {
    const char *path = find("count_calls", ALL, NONE);
    char line[160];
    if (!path) {
        return;
    }
    int descriptor = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    int length = snprintf(line, sizeof line, "%d %s %d\n", (int)getpid(), call, device ? device->card : ALL);
    if (descriptor >= 0 && write(descriptor, line, (size_t)length) < 0) {
        perror(path);
    }
    if (descriptor >= 0) {
        close(descriptor);
    }
}

/* The nearest order for this call: named before "*", the instance's before the card's before all cards'. */
static const char *fault(const char *call, const Device *device) {
    const char *names[] = {call, "*"};
    const char *found = NULL;
    for (size_t i = 0; state.faults && !found && i < LENGTH(names); i++) {
        if (device && device->mig != NONE) {
            found = find(names[i], device->card, device->mig);
        }
        if (!found && device) {
            found = find(names[i], device->card, NONE);
        }
        if (!found) {
            found = find(names[i], ALL, NONE);
        }
    }
    return found;
}

static bool hangs(const char *order) { return order && strncmp(order, "hang", 4) == 0; }

/* Until the order is gone.  "hang:deaf" holds signals back meanwhile, as a process in state D does. */
static void hang(const char *call, const Device *device) {
    sigset_t every, before;
    bool deaf = strcmp(fault(call, device), "hang:deaf") == 0;
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, deaf ? &every : NULL, &before);
    for (int waited = 0; waited < HANG_LIMIT_MS && hangs(fault(call, device)); waited += RECHECK_MS) {
        nap(RECHECK_MS);
        refresh();
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* "ret:CODE", "delay:MILLISECONDS", both with a comma between, or "hang". */
static Code obey(const char *call, const Device *device) {
    const char *order = fault(call, device);
    if (hangs(order)) {
        hang(call, device);
        return SUCCESS;
    }
    const char *delay = order ? strstr(order, "delay:") : NULL, *code = order ? strstr(order, "ret:") : NULL;
    Code answer = code ? (Code)strtoul(code + 4, NULL, 0) : SUCCESS;
    if (delay) {
        nap(strtoull(delay + 6, NULL, 0));
    }
    return answer;
}

/* A driver that was loaded anew ("epoch" has grown) knows nothing of this process. */
static Code driver_code(void) {
    if (number_or(NULL, "epoch", 0) > loaded_epoch) {
        return (Code)number_or(NULL, "reload_ret", LIB_RM_VERSION_MISMATCH);
    }
    return initialised > 0 ? SUCCESS : UNINITIALIZED;
}

/* "access lost": the container may no longer open the device nodes.  "3.lost 15": the card is gone;
 * "3.resets 1": it was reset, and processes from before that keep dead handles. */
static Code card_code(const Device *card) {
    const char *access = find("access", ALL, NONE);
    if (access && strcmp(access, "ok") != 0) {
        return strcmp(access, "lost") == 0 ? UNKNOWN : (Code)strtoul(access, NULL, 0);
    }
    if ((Uint)card->card >= count()) {
        return GPU_IS_LOST;
    }
    if (number_or(card, "resets", 0) > loaded_resets[card->card]) {
        return (Code)number_or(card, "stale_ret", GPU_IS_LOST);
    }
    return (Code)number_or(card, "lost", SUCCESS);
}

static Code enter(const char *call, const Device *device) {
    refresh();
    note_call(call, device);
    Code code = obey(call, device);
    return code != SUCCESS ? code : driver_code();
}

static bool is_device(const Device *device) {
    uintptr_t offset = (uintptr_t)device - (uintptr_t)devices;
    return offset < sizeof devices && offset % sizeof(Device) == 0;
}

static Code enter_device(const char *call, const Device *device) {
    if (!is_device(device)) {
        return INVALID_ARGUMENT;
    }
    Code code = enter(call, device);
    if (code == SUCCESS) {
        code = card_code(&devices[device->card][0]);
    }
    if (code == SUCCESS && device->mig != NONE && !value(device, "instance")) {
        code = INVALID_ARGUMENT; /* the instance was destroyed */
    }
    return code;
}

#define CHECK(expression)              \
    do {                               \
        Code code_ = (expression);     \
        if (code_ != SUCCESS) {        \
            return code_;              \
        }                              \
    } while (0)
#define ENTER() CHECK(enter(__func__, NULL))
#define ENTER_DEVICE(device) CHECK(enter_device(__func__, device))
/* For what only a whole card has: power, clocks, PCIe, utilisation. */
#define ENTER_CARD(device)         \
    ENTER_DEVICE(device);          \
    if ((device)->mig != NONE) {   \
        return NOT_SUPPORTED;      \
    }

/* ---- the library ---- */

API Code nvmlInitWithFlags(Uint flags) {
    (void)flags;
    refresh();
    note_call(__func__, NULL);
    CHECK(obey(__func__, NULL));
    Code code = driver_code();
    if (code != SUCCESS && code != UNINITIALIZED) {
        return code;
    }
    initialised++;
    return SUCCESS;
}

API Code nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API Code nvmlShutdown(void) {
    ENTER();
    initialised--;
    return SUCCESS;
}

API const char *nvmlErrorString(Code code) {
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "GPU access blocked by the operating system",
        "Driver/library version mismatch"};
    return code < LENGTH(texts) ? texts[code] : "Unknown Error";
}

static Code system_text(const char *key, const char *fallback, char *out, Uint size) {
    const char *text = value(NULL, key);
    return copy(text ? text : fallback, out, size);
}

API Code nvmlSystemGetDriverVersion(char *out, Uint size) {
    ENTER();
    return system_text("driver", "580.95.05", out, size);
}

API Code nvmlSystemGetNVMLVersion(char *out, Uint size) {
    ENTER();
    return system_text("nvml", "13.580.95.05", out, size);
}

API Code nvmlSystemGetCudaDriverVersion_v2(int *out) {
    ENTER();
    return number32(NULL, "cuda", 13000, (Uint *)out);
}

API Code nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

API Code nvmlDeviceGetCount_v2(Uint *out) {
    ENTER();
    *out = count();
    return SUCCESS;
}

/* ---- handles ---- */

/* A lost card often fails here with another code (999) than elsewhere (15): "3.lost_handle 999". */
static Code take_handle(const char *call, Uint index, Device **out) {
    Device *card = index < CARDS ? &devices[index][0] : NULL;
    CHECK(enter(call, card));
    if (index >= count()) {
        return INVALID_ARGUMENT;
    }
    Code code = card_code(card);
    if (code != SUCCESS && value(card, "lost_handle")) {
        code = (Code)number_or(card, "lost_handle", code);
    }
    *out = card;
    return code;
}

API Code nvmlDeviceGetHandleByIndex_v2(Uint index, Device **out) { return take_handle(__func__, index, out); }

static void default_uuid(const Device *device, char *out, size_t size) {
    const char *kind = device->mig == NONE ? "GPU" : "MIG";
    snprintf(out, size, "%s-5ca1ab1e-0000-4000-8000-%06x%06x", kind, (Uint)device->card, (Uint)(device->mig + 1));
}

static void uuid(const Device *device, char out[96]) {
    const char *text = value(device, "uuid");
    default_uuid(device, out, 96);
    if (text) {
        snprintf(out, 96, "%s", text);
    }
}

API Code nvmlDeviceGetHandleByUUID(const char *wanted, Device **out) {
    ENTER();
    for (Uint card = 0; card < count(); card++) {
        for (int column = 0; column <= INSTANCES; column++) {
            char own[96];
            Device *device = &devices[card][column];
            uuid(device, own);
            if (strcmp(own, wanted) == 0 && (column == 0 || value(device, "instance"))) {
                *out = device;
                return card_code(&devices[card][0]);
            }
        }
    }
    return NOT_FOUND;
}

typedef struct {
    char legacy[16];
    Uint domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

static void place(const Device *device, PciInfo *out) {
    const char *text = value(&devices[device->card][0], "pci");
    memset(out, 0, sizeof *out);
    out->bus = 0x10 + (Uint)device->card;
    if (text) {
        sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    }
    out->pci_device_id = 0x233010de;
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus & 0xff, out->device & 0xff);
}

API Code nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *out) {
    ENTER_DEVICE(device);
    place(device, out);
    return SUCCESS;
}

API Code nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, Device **out) {
    Uint domain = 0, bus = 0, slot = 0;
    ENTER();
    for (Uint card = 0; sscanf(wanted, "%x:%x:%x", &domain, &bus, &slot) == 3 && card < count(); card++) {
        PciInfo own;
        place(&devices[card][0], &own);
        if (own.domain == domain && own.bus == bus && own.device == slot) {
            *out = &devices[card][0];
            return card_code(*out);
        }
    }
    return NOT_FOUND;
}

/* ---- what a card is ---- */

API Code nvmlDeviceGetUUID(Device *device, char *out, Uint size) {
    char text[96];
    ENTER_DEVICE(device);
    uuid(device, text);
    return copy(text, out, size);
}

API Code nvmlDeviceGetName(Device *device, char *out, Uint size) {
    ENTER_DEVICE(device);
    char text[160];
    const char *own = value(device, "name"), *card = value(&devices[device->card][0], "name");
    const char *suffix = device->mig == NONE || own ? "" : " MIG 1g.10gb";
    snprintf(text, sizeof text, "%s%s", own ? own : card ? card : "NVIDIA H100 80GB HBM3", suffix);
    return copy(text, out, size);
}

API Code nvmlDeviceGetIndex(Device *device, Uint *out) {
    ENTER_DEVICE(device);
    *out = (Uint)(device->mig == NONE ? device->card : device->mig);
    return SUCCESS;
}

API Code nvmlDeviceGetMinorNumber(Device *device, Uint *out) {
    ENTER_CARD(device);
    return number32(device, "minor", (Ull)device->card, out);
}

static const char *capability(const Device *device) {
    const char *text = value(&devices[device->card][0], "capability");
    return text ? text : "9.0";
}

API Code nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    ENTER_DEVICE(device);
    return sscanf(capability(device), "%d.%d", major, minor) == 2 ? SUCCESS : NOT_SUPPORTED;
}

/* ---- figures ---- */

#define CARD_FIGURE(call, key, fallback)                                  \
    API Code call(Device *device, Uint *out) {                            \
        ENTER_CARD(device);                                               \
        return number32(device, key, fallback, out);                      \
    }
#define CARD_FIGURE_64(call, key, fallback)                               \
    API Code call(Device *device, Ull *out) {                             \
        ENTER_CARD(device);                                               \
        return number(device, key, fallback, out);                        \
    }

CARD_FIGURE(nvmlDeviceGetPowerUsage, "power_mw", 70000)
CARD_FIGURE(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", 700000)
CARD_FIGURE(nvmlDeviceGetPowerManagementLimit, "power_limit_mw", 700000)
CARD_FIGURE(nvmlDeviceGetPerformanceState, "pstate", 0)
CARD_FIGURE(nvmlDeviceGetPersistenceMode, "persistence", 1)
CARD_FIGURE_64(nvmlDeviceGetCurrentClocksEventReasons, "clock_reasons", 0)
CARD_FIGURE_64(nvmlDeviceGetCurrentClocksThrottleReasons, "clock_reasons", 0)

API Code nvmlDeviceGetTotalEnergyConsumption(Device *device, Ull *out) {
    ENTER_CARD(device);
    return counter(device, ENERGY, out);
}

API Code nvmlDeviceGetClockInfo(Device *device, Uint type, Uint *out) {
    static const struct {
        const char *key;
        Ull fallback;
    } clocks[] = {
        {"clock_graphics_mhz", 1980}, {"clock_sm_mhz", 1980}, {"clock_mem_mhz", 2619}, {"clock_video_mhz", 1545}};
    ENTER_CARD(device);
    return type < LENGTH(clocks) ? number32(device, clocks[type].key, clocks[type].fallback, out) : INVALID_ARGUMENT;
}

API Code nvmlDeviceGetTemperature(Device *device, Uint sensor, Uint *out) {
    ENTER_CARD(device);
    return sensor == 0 ? number32(device, "temperature", 35, out) : INVALID_ARGUMENT;
}

typedef struct {
    Uint version, sensor;
    int temperature;
} Temperature;

API Code nvmlDeviceGetTemperatureV(Device *device, Temperature *out) {
    ENTER_CARD(device);
    if (out->version != (sizeof *out | 1u << 24)) {
        return ARGUMENT_VERSION_MISMATCH;
    }
    return out->sensor == 0 ? number32(device, "temperature", 35, (Uint *)&out->temperature) : INVALID_ARGUMENT;
}

typedef struct {
    Uint gpu, memory;
} Utilization;

static bool mig_is_on(const Device *device) {
    const char *mode = value(&devices[device->card][0], "mig");
    return mode && strcmp(mode, "on") == 0;
}

API Code nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
    ENTER_CARD(device);
    if (mig_is_on(device)) {
        return NOT_SUPPORTED;
    }
    CHECK(number32(device, "util_gpu", 0, &out->gpu));
    return number32(device, "util_mem", 0, &out->memory);
}

/* Never cheap: the real one measures within the call. */
API Code nvmlDeviceGetPcieThroughput(Device *device, Uint direction, Uint *out) {
    ENTER_CARD(device);
    nap(PCIE_THROUGHPUT_MS);
    CHECK(number32(device, direction == 0 ? "pcie_tx_per_second" : "pcie_rx_per_second", 0, out));
    *out /= 1000;
    return SUCCESS;
}

/* ---- processes ---- */

typedef struct {
    Uint pid;
    Ull bytes;
    Uint gi, ci;
} Process;

typedef struct {
    Uint length;
    Process rows[PROCESSES];
} Processes;

/* Which GI and CI an instance is: "3:1.instance 9/0". */
static void instance(const Device *device, Uint *gi, Uint *ci) {
    const char *text = device->mig == NONE ? NULL : value(device, "instance");
    *gi = *ci = UINT32_MAX;
    if (text && sscanf(text, "%u/%u", gi, ci) < 1) {
        *gi = *ci = (Uint)device->mig;
    }
}

/* "PID:BYTES,…"; BYTES may be "none".  PID:BYTES:GI:CI says what the instance would. */
static void add_processes(const Device *device, const char *key, Processes *to) {
    const char *at = value(device, key);
    while (at && *at && to->length < PROCESSES) {
        Process *row = &to->rows[to->length];
        instance(device, &row->gi, &row->ci);
        row->bytes = UINT64_MAX; /* what "none" leaves it at */
        if (sscanf(at, "%u:%llu:%u:%u", &row->pid, &row->bytes, &row->gi, &row->ci) >= 1) {
            to->length++;
        }
        at = strchr(at, ',');
        at = at ? at + 1 : NULL;
    }
}

/* A card lists its instances' processes as well. */
static void gather(const Device *device, const char *key, Processes *to) {
    to->length = 0;
    add_processes(device, key, to);
    for (int mig = 0; device->mig == NONE && mig_is_on(device) && mig < INSTANCES; mig++) {
        add_processes(&devices[device->card][1 + mig], key, to);
    }
}

static Code list_processes(const char *call, Device *device, const char *key, Uint *length, Process *rows) {
    Processes all;
    CHECK(enter_device(call, device));
    const char *text = value(device, key);
    if (text && strcmp(text, "none") == 0) {
        return NOT_SUPPORTED;
    }
    gather(device, key, &all);
    Uint room = rows ? *length : 0;
    *length = all.length;
    if (room < all.length) {
        return INSUFFICIENT_SIZE;
    }
    if (all.length != 0) {
        memcpy(rows, all.rows, all.length * sizeof *rows);
    }
    return SUCCESS;
}

#define PROCESS_LIST(call, key)                                           \
    API Code call(Device *device, Uint *length, Process *rows) {          \
        return list_processes(__func__, device, key, length, rows);       \
    }

/* The binding declares the same structure for both versions. */
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, "processes")
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, "processes")
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps")
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")

/* ---- memory ---- */

typedef struct {
    Ull total, reserved, used;
} Memory;

/* "mem_used auto", the default, is what the processes hold together. */
static Ull held(const Device *device) {
    Processes all;
    Ull sum = 0;
    gather(device, "processes", &all);
    for (Uint i = 0; i < all.length; i++) {
        sum += all.rows[i].bytes == UINT64_MAX ? 0 : all.rows[i].bytes;
    }
    return sum;
}

static Code memory(const Device *device, Memory *out) {
    bool whole = device->mig == NONE;
    const char *used = value(device, "mem_used");
    CHECK(number(device, "mem_total", whole ? 85520809984ULL : 10468982784ULL, &out->total));
    CHECK(number(device, "mem_reserved", whole ? 536870912ULL : 16777216ULL, &out->reserved));
    CHECK(number(device, "mem_used", 0, &out->used));
    if (!used || strcmp(used, "auto") == 0) {
        out->used = held(device);
    }
    return SUCCESS;
}

static Ull unused(const Memory *memory) {
    Ull taken = memory->used + memory->reserved;
    return taken < memory->total ? memory->total - taken : 0;
}

typedef struct {
    Ull total, free, used;
} MemoryV1;

/* The first version counts the driver's reserve as used. */
API Code nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *out) {
    Memory now;
    ENTER_DEVICE(device);
    CHECK(memory(device, &now));
    *out = (MemoryV1){now.total, unused(&now), now.used + now.reserved};
    return SUCCESS;
}

typedef struct {
    Uint version;
    Ull total, reserved, free, used;
} MemoryV2;

API Code nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) {
    Memory now;
    ENTER_DEVICE(device);
    if (out->version != (sizeof *out | 2u << 24)) {
        return ARGUMENT_VERSION_MISMATCH;
    }
    CHECK(memory(device, &now));
    *out = (MemoryV2){out->version, now.total, now.reserved, unused(&now), now.used};
    return SUCCESS;
}

/* ---- field values ---- */

typedef struct {
    Uint id, scope;
    int64_t timestamp, latency;
    Uint type;
    Code code;
    union {
        double real;
        Uint uint;
        Ull ull;
        int64_t sll;
        int sint;
        unsigned short ushort;
    } value;
} Field;

enum { REAL = 0, UINT = 1, ULONG = 2, ULL = 3, SLL = 4, SINT = 5, USHORT = 6 };

static void put(Field *field, Uint type, Ull number) {
    field->type = type;
    field->value.ull = 0; /* the rest of the union is not ours to leave unset */
    if (type == UINT || type == SINT) {
        field->value.uint = (Uint)number;
    } else if (type == USHORT) {
        field->value.ushort = (unsigned short)number;
    } else if (type == REAL) {
        field->value.real = (double)number;
    } else {
        field->value.ull = number;
    }
}

/* "3.field.160 NUMBER", "3.field.160 TYPE:NUMBER" with the binding's number of the type, "3.field.160 ret:CODE". */
static Code told_field(const char *text, Field *field) {
    const char *colon = strchr(text, ':');
    if (strcmp(text, "none") == 0) {
        return NOT_SUPPORTED;
    }
    if (strncmp(text, "ret:", 4) == 0) {
        return (Code)strtoul(text + 4, NULL, 0);
    }
    put(field, colon ? (Uint)strtoul(text, NULL, 0) : ULL, strtoull(colon ? colon + 1 : text, NULL, 0));
    return SUCCESS;
}

/* PCIe bytes may come in 32 bits that wrap: "3.pcie_bits 32". */
static Code counted_field(const Device *device, CounterId id, Field *field) {
    Ull now = 0;
    CHECK(counter(device, id, &now));
    bool narrow = (id == PCIE_TX || id == PCIE_RX) && number_or(device, "pcie_bits", 64) == 32;
    bool kibibytes = id == NVLINK_TX || id == NVLINK_RX;
    put(field, narrow ? UINT : ULL, kibibytes ? now / 1024 : now);
    return SUCCESS;
}

static const struct {
    Uint id;
    CounterId counter; /* COUNTERS: a plain figure */
    const char *key;
    Ull fallback;
} fields[] = {
    {83, ENERGY, NULL, 0},      {191, ENERGY, NULL, 0},    {138, NVLINK_TX, NULL, 0},
    {139, NVLINK_RX, NULL, 0},  {197, PCIE_TX, NULL, 0},   {198, PCIE_RX, NULL, 0},
    {185, COUNTERS, "power_mw", 70000}, {186, COUNTERS, "power_mw", 70000}, {230, COUNTERS, "recovery_action", 0},
};

static Code known_field(const Device *device, Field *field) {
    for (size_t i = 0; i < LENGTH(fields); i++) {
        if (fields[i].id != field->id) {
            continue;
        }
        if (fields[i].counter != COUNTERS) {
            return counted_field(device, fields[i].counter, field);
        }
        Ull now = 0;
        Code code = number(device, fields[i].key, fields[i].fallback, &now);
        put(field, UINT, now);
        return code;
    }
    return NOT_SUPPORTED;
}

static void fill_field(const Device *device, Field *field) {
    char key[32];
    snprintf(key, sizeof key, "field.%u", field->id);
    const char *told = value(device, key);
    field->timestamp = (int64_t)time(NULL) * 1000000;
    field->latency = 1;
    if (told) {
        field->code = told_field(told, field);
    } else {
        field->code = device->mig == NONE ? known_field(device, field) : NOT_SUPPORTED;
    }
}

API Code nvmlDeviceGetFieldValues(Device *device, int length, Field *out) {
    ENTER_DEVICE(device);
    for (int i = 0; i < length; i++) {
        fill_field(device, &out[i]);
    }
    return SUCCESS;
}

/* ---- GPM: averages between two samples, Hopper and later ---- */

typedef struct {
    const Device *device; /* NULL: never taken */
    double at;
    Ull counted[COUNTERS];
} Sample;

typedef struct {
    Uint version, supported;
} GpmSupport;

typedef struct {
    Uint id;
    Code code;
    double value;
    const char *names[3];
} Metric;

typedef struct {
    Uint version, length;
    Sample *first, *second;
    Metric metrics[];
} Metrics;

static bool has_gpm(const Device *device) {
    return number_or(&devices[device->card][0], "gpm", atoi(capability(device)) >= 9) != 0;
}

API Code nvmlGpmQueryDeviceSupport(Device *device, GpmSupport *out) {
    ENTER_DEVICE(device);
    if (out->version != 1) {
        return ARGUMENT_VERSION_MISMATCH;
    }
    out->supported = has_gpm(device);
    return SUCCESS;
}

API Code nvmlGpmSampleAlloc(Sample **out) {
    ENTER();
    *out = calloc(1, sizeof **out);
    return *out ? SUCCESS : UNKNOWN;
}

API Code nvmlGpmSampleFree(Sample *sample) {
    ENTER();
    free(sample);
    return SUCCESS;
}

static Code take_sample(const Device *device, Sample *out) {
    if (!has_gpm(device)) {
        return NOT_SUPPORTED;
    }
    *out = (Sample){.device = device, .at = monotonic()};
    for (CounterId id = PCIE_TX; id < COUNTERS; id++) {
        counter(device, id, &out->counted[id]);
    }
    return SUCCESS;
}

API Code nvmlGpmSampleGet(Device *device, Sample *out) {
    ENTER_DEVICE(device);
    return take_sample(device, out);
}

/* By the GPU instance's id, which is not the index of its handle. */
API Code nvmlGpmMigSampleGet(Device *device, Uint gi, Sample *out) {
    ENTER_DEVICE(device);
    for (int mig = 0; mig < INSTANCES; mig++) {
        Uint own, ci;
        const Device *candidate = &devices[device->card][1 + mig];
        instance(candidate, &own, &ci);
        if (value(candidate, "instance") && own == gi) {
            return take_sample(candidate, out);
        }
    }
    return NOT_FOUND;
}

/* A gauge is read from its key, else from the utilisation it would go with, else it is 0. */
static const struct {
    Uint id;
    const char *key, *else_key;
    CounterId rate; /* COUNTERS: a gauge; else MiB/s between the samples */
} gpm[] = {
    {1, "gpm_graphics", "util_gpu", COUNTERS}, {2, "gpm_sm", "util_gpu", COUNTERS},
    {3, "gpm_occupancy", NULL, COUNTERS},      {5, "gpm_tensor", NULL, COUNTERS},
    {10, "gpm_dram", "util_mem", COUNTERS},    {20, "gpm_pcie_tx", NULL, PCIE_TX},
    {21, "gpm_pcie_rx", NULL, PCIE_RX},        {60, "gpm_nvlink_rx", NULL, NVLINK_RX},
    {61, "gpm_nvlink_tx", NULL, NVLINK_TX},
};

static Code metric_of(size_t row, const Sample *first, const Sample *second, double *out) {
    const char *text = value(second->device, gpm[row].key);
    double seconds = second->at - first->at;
    if (!text && gpm[row].else_key) {
        text = value(second->device, gpm[row].else_key);
    }
    if (text && strcmp(text, "none") == 0) {
        return NOT_SUPPORTED;
    }
    if (text && strncmp(text, "ret:", 4) == 0) {
        return (Code)strtoul(text + 4, NULL, 0);
    }
    *out = text ? strtod(text, NULL) : 0;
    if (!text && gpm[row].rate != COUNTERS && seconds > 0) {
        Ull moved = second->counted[gpm[row].rate] - first->counted[gpm[row].rate];
        *out = (double)moved / seconds / 1048576;
    }
    return SUCCESS;
}

static Code metric(Metric *out, const Sample *first, const Sample *second) {
    for (size_t row = 0; row < LENGTH(gpm); row++) {
        if (gpm[row].id == out->id) {
            return metric_of(row, first, second, &out->value);
        }
    }
    return NOT_SUPPORTED;
}

API Code nvmlGpmMetricsGet(Metrics *out) {
    ENTER();
    if (out->version != 1) {
        return ARGUMENT_VERSION_MISMATCH;
    }
    if (!out->first || !out->second || !out->first->device || out->first->device != out->second->device) {
        return INVALID_ARGUMENT;
    }
    for (Uint i = 0; i < out->length; i++) {
        out->metrics[i].code = metric(&out->metrics[i], out->first, out->second);
    }
    return SUCCESS;
}

/* ---- MIG: "3.mig on", then "3:0.instance GI/CI" for each instance there is ---- */

API Code nvmlDeviceGetMigMode(Device *device, Uint *current, Uint *pending) {
    ENTER_CARD(device);
    if (!value(device, "mig")) {
        return NOT_SUPPORTED;
    }
    *current = *pending = mig_is_on(device);
    return SUCCESS;
}

API Code nvmlDeviceGetMaxMigDeviceCount(Device *device, Uint *out) {
    ENTER_CARD(device);
    return number32(device, "mig_max", value(device, "mig") ? 7 : 0, out);
}

API Code nvmlDeviceGetMigDeviceHandleByIndex(Device *device, Uint index, Device **out) {
    ENTER_CARD(device);
    if (!mig_is_on(device)) {
        return NOT_SUPPORTED;
    }
    if (index >= INSTANCES) {
        return INVALID_ARGUMENT;
    }
    *out = &devices[device->card][1 + index];
    return value(*out, "instance") ? SUCCESS : NOT_FOUND;
}

API Code nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *device, Device **out) {
    ENTER_DEVICE(device);
    *out = &devices[device->card][0];
    return device->mig == NONE ? INVALID_ARGUMENT : SUCCESS;
}

API Code nvmlDeviceIsMigDeviceHandle(Device *device, Uint *out) {
    ENTER_DEVICE(device);
    *out = device->mig != NONE;
    return SUCCESS;
}

API Code nvmlDeviceGetGpuInstanceId(Device *device, Uint *out) {
    Uint ci;
    ENTER_DEVICE(device);
    instance(device, out, &ci);
    return device->mig == NONE ? NOT_SUPPORTED : SUCCESS;
}

API Code nvmlDeviceGetComputeInstanceId(Device *device, Uint *out) {
    Uint gi;
    ENTER_DEVICE(device);
    instance(device, &gi, out);
    return device->mig == NONE ? NOT_SUPPORTED : SUCCESS;
}

typedef struct {
    Uint multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gi_slices, ci_slices;
    Ull mebibytes;
} Attributes;

API Code nvmlDeviceGetAttributes_v2(Device *device, Attributes *out) {
    Memory now;
    ENTER_DEVICE(device);
    if (device->mig == NONE) {
        return NOT_SUPPORTED;
    }
    CHECK(memory(device, &now));
    *out = (Attributes){.multiprocessors = 16, .copy_engines = 1, .gi_slices = 1, .ci_slices = 1};
    out->mebibytes = now.total >> 20;
    return SUCCESS;
}

/* ---- events: "3.xids 1:79,2:31", numbered in the order they happened ---- */

enum { XID_CRITICAL_ERROR = 8, SUPPORTED_EVENTS = 0x1f };

typedef struct {
    Ull types[CARDS], seen[CARDS];
} EventSet;

typedef struct {
    Device *device;
    Ull type, data;
    Uint gi, ci;
} Event;

/* The first Xid of a card with a number above `seen`; 0 and `seen` as it was when there is none. */
static Ull next_xid(const Device *card, Ull *seen) {
    const char *at = value(card, "xids");
    while (at && *at) {
        char *end;
        Ull order = strtoull(at, &end, 10);
        if (order > *seen && *end == ':') {
            *seen = order;
            return strtoull(end + 1, NULL, 10);
        }
        at = strchr(at, ',');
        at = at ? at + 1 : NULL;
    }
    return 0;
}

API Code nvmlEventSetCreate(EventSet **out) {
    ENTER();
    *out = calloc(1, sizeof **out);
    return *out ? SUCCESS : UNKNOWN;
}

API Code nvmlEventSetFree(EventSet *set) {
    ENTER();
    free(set);
    return SUCCESS;
}

API Code nvmlDeviceGetSupportedEventTypes(Device *device, Ull *out) {
    ENTER_CARD(device);
    return number(device, "event_types", SUPPORTED_EVENTS, out);
}

/* What happened before the registration is not told. */
API Code nvmlDeviceRegisterEvents(Device *device, Ull types, EventSet *set) {
    Ull supported = 0;
    ENTER_CARD(device);
    CHECK(number(device, "event_types", SUPPORTED_EVENTS, &supported));
    if ((types & ~supported) != 0) {
        return NOT_SUPPORTED;
    }
    set->types[device->card] |= types;
    while (next_xid(device, &set->seen[device->card]) != 0) {
    }
    return SUCCESS;
}

static Code look_for_event(EventSet *set, Event *out) {
    Code code = TIMEOUT;
    for (int card = 0; card < CARDS; card++) {
        Device *device = &devices[card][0];
        Ull xid = set->types[card] & XID_CRITICAL_ERROR ? next_xid(device, &set->seen[card]) : 0;
        if (xid != 0) {
            *out = (Event){device, XID_CRITICAL_ERROR, xid, UINT32_MAX, UINT32_MAX};
            return SUCCESS;
        }
        if (set->types[card] != 0 && card_code(device) != SUCCESS) {
            code = GPU_IS_LOST;
        }
    }
    return code;
}

API Code nvmlEventSetWait_v2(EventSet *set, Event *out, Uint milliseconds) {
    ENTER();
    for (Uint left = milliseconds;;) {
        Uint step = left < RECHECK_MS ? left : RECHECK_MS;
        Code code = look_for_event(set, out);
        if (code != TIMEOUT || left == 0) {
            return code;
        }
        nap(step);
        left -= step;
        refresh();
    }
}
