/* Stands in for libcuda.so.1, as far as Triton's launcher goes: nothing runs, launches are recorded. While stub_record is on, each is a line
   "<name> <grid> <threads> <shared> <stream> <parameter> ..." at stub_log, its parameters in hexadecimal, as many and as
   large as stub_parameters was told for the kernel of that name (none before). A tensor map holds what it was asked for. */
#include <cuda.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MOST 64

static struct { char name[256]; int count, sizes[MOST]; } kernels[MOST];
static int known;
static char text[1 << 20];
static size_t length;

static void note(const char *format, ...) {
    va_list values;
    va_start(values, format);
    length += vsnprintf(text + length, sizeof text - length, format, values);
    va_end(values);
}

const char *stub_log(void) { return text; }
static int recording;
void stub_record(int whether) {
    recording = whether;
    if (whether) text[length = 0] = 0;
}

static int index_of(const char *name) {
    for (int i = 0; i < known; i++)
        if (!strcmp(kernels[i].name, name)) return i;
    if (known == MOST) return -1;
    strncpy(kernels[known].name, name, sizeof kernels->name - 1);
    return known++;
}

int stub_parameters(const char *name, int count, const int *sizes) {
    int i = index_of(name);
    if (i < 0 || count > MOST) return -1;
    kernels[i].count = count;
    memcpy(kernels[i].sizes, sizes, count * sizeof *sizes);
    return 0;
}

CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)8; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)8; return 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    /* of an H200: bytes of shared memory for a block that asks for them, and else a number that nothing depends on */
    *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 132;
    return 0;
}
CUresult cuGetErrorString(CUresult error, const char **string) { *string = "stub error"; return 0; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)8; return 0; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    int i = index_of(name);
    *function = (CUfunction)&kernels[i];
    return i < 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return 0;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)data = pointer;
    return 0;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    *count = 1;
    return 0;
}
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    char *to = (char *)map;
    memset(map, 0, sizeof *map);
    int kinds[] = {type, (int)rank, interleave, swizzle, promotion, fill};
    memcpy(to, &address, 8);
    memcpy(to + 8, sizes, rank * 8);
    memcpy(to + 32, strides, (rank - 1) * 8);
    memcpy(to + 56, box, rank * 4);
    memcpy(to + 72, steps, rank * 4);
    memcpy(to + 88, kinds, sizeof kinds);
    return rank > 2;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    if (!recording) return 0;
    int i = (int)((char *)function - (char *)kernels) / (int)sizeof *kernels;
    note("%s %ux%ux%u %u %u %llu", kernels[i].name, config->gridDimX, config->gridDimY, config->gridDimZ,
         config->blockDimX, config->sharedMemBytes, (unsigned long long)config->hStream);
    for (int p = 0; p < kernels[i].count; p++) {
        note(" ");
        for (int byte = 0; byte < kernels[i].sizes[p]; byte++) note("%02x", ((unsigned char *)parameters[p])[byte]);
    }
    note("\n");
    return 0;
}
