/* Stands in for libnvidia-ml.so.1: one GPU whose clocks can be locked. Every call that matters is a line
   "<pid> <call> [values]" in the file $NVML_STUB_LOG. $NVML_STUB_SET_SM, _SET_MEMORY and _RESET are the error codes
   that locking and resetting answer (0 or unset: success), $NVML_STUB_MIG is "device" or "mode". */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int stub_marker = 1;

#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7

static void note(const char *format, ...) {
    FILE *file = fopen(getenv("NVML_STUB_LOG"), "a");
    if (!file) abort();
    char text[256];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    fprintf(file, "%d %s\n", (int)getpid(), text);
    fclose(file);
}

static int code(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

static int is(const char *name, const char *value) {
    const char *text = getenv(name);
    return text && !strcmp(text, value);
}

int nvmlInitWithFlags(unsigned flags) { note("init"); return 0; }
int nvmlShutdown(void) { note("shutdown"); return 0; }
const char *nvmlErrorString(int error) { return "stub error"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)8;
    return index ? INVALID_ARGUMENT : 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)8;
    return strcmp(uuid, "GPU-stub") ? INVALID_ARGUMENT : 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) { strncpy(uuid, "GPU-stub", length); return 0; }

int nvmlDeviceIsMigDeviceHandle(void *device, unsigned *mig) { *mig = is("NVML_STUB_MIG", "device"); return 0; }
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    if (!getenv("NVML_STUB_MIG")) return NOT_SUPPORTED;
    *current = *pending = is("NVML_STUB_MIG", "mode");
    return 0;
}

static int list(const unsigned *values, unsigned length, unsigned *count, unsigned *out) {
    unsigned room = out ? *count : 0;
    *count = length;
    if (room < length) return INSUFFICIENT_SIZE;
    memcpy(out, values, length * sizeof *values);
    return 0;
}
int nvmlDeviceGetSupportedMemoryClocks(void *device, unsigned *count, unsigned *mhz) {
    static const unsigned clocks[] = {3201, 1593};
    return list(clocks, 2, count, mhz);
}
int nvmlDeviceGetSupportedGraphicsClocks(void *device, unsigned memory, unsigned *count, unsigned *mhz) {
    static const unsigned fast[] = {1980, 1965, 1950, 345}, slow[] = {1200, 345};
    return memory == 3201 ? list(fast, 4, count, mhz) : list(slow, 2, count, mhz);
}
int nvmlDeviceGetDefaultApplicationsClock(void *device, int kind, unsigned *mhz) { *mhz = 1950; return 0; }

int nvmlDeviceSetGpuLockedClocks(void *device, unsigned low, unsigned high) {
    note("set_sm %u %u", low, high);
    return code("NVML_STUB_SET_SM");
}
int nvmlDeviceResetGpuLockedClocks(void *device) { note("reset_sm"); return code("NVML_STUB_RESET"); }
int nvmlDeviceSetMemoryLockedClocks(void *device, unsigned low, unsigned high) {
    note("set_memory %u %u", low, high);
    return code("NVML_STUB_SET_MEMORY");
}
int nvmlDeviceResetMemoryLockedClocks(void *device) { note("reset_memory"); return code("NVML_STUB_RESET"); }
