/* A GPU driver that has no GPU: it checks what portattn/driver.py passes, and fails where it is told to.
 *
 * FAKE_FAIL="cuLaunchKernel:2:719" makes the second call of cuLaunchKernel say 719, with 0 each call. fake_log() gives one line a call.
 * Built under two sets of names, CUDA's and HIP's (-DHIP). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HIP
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif

static char log_[1 << 16];
static char params_[4096];
static char maps_[520]; /* the second argument, of the kernel that has one */
static int calls_[32], depth_;
static void* stack_[64];
static unsigned modules_, mode_;

const char* fake_log(void) { return log_; }
const char* fake_params(void) { return params_; }
const char* fake_maps(void) { return maps_; }
int fake_depth(void) { return depth_; }
void fake_reset(void) { log_[0] = 0; memset(calls_, 0, sizeof calls_); }

static int note(int which, const char* name, const char* text) {
  char line[256];
  snprintf(line, sizeof line, "%s %s\n", name, text);
  if (strlen(log_) + strlen(line) < sizeof log_) strcat(log_, line);
  const char* fail = getenv("FAKE_FAIL");
  ++calls_[which];
  if (fail && !strncmp(fail, name, strlen(name)) && fail[strlen(name)] == ':') {
    int nth, code;
    if (sscanf(fail + strlen(name), ":%d:%d", &nth, &code) == 2 && (nth == calls_[which] || !nth)) return code;
  }
  return 0;
}
#define NOTE(which, name, ...) char text[200]; snprintf(text, sizeof text, __VA_ARGS__); int code = note(which, name, text); if (code) return code

int NAME(cuInit, hipInit)(unsigned flags) { NOTE(0, "init", "%u", flags); return 0; }
int NAME(cuDriverGetVersion, hipDriverGetVersion)(int* v) { *v = 13000; return 0; }
int NAME(cuDeviceGet, hipDeviceGet)(int* device, int ordinal) { NOTE(1, "device", "%d", ordinal); *device = 100 + ordinal; return 0; }
int NAME(cuDevicePrimaryCtxRetain, hipDevicePrimaryCtxRetain)(void** context, int device) {
  NOTE(2, "retain", "%d", device);
  *context = (void*)(uintptr_t)(0x1000 + device);
  return 0;
}
int NAME(cuCtxPushCurrent_v2, hipCtxPushCurrent)(void* context) {
  NOTE(3, "push", "%p", context);
  stack_[depth_++] = context;
  return 0;
}
int NAME(cuCtxPopCurrent_v2, hipCtxPopCurrent)(void** context) {
  if (!depth_) return 201;
  *context = stack_[--depth_];
  return 0;
}
int NAME(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)(int* mode) {
  int before = (int)mode_;
  mode_ = (unsigned)*mode;
  *mode = before;
  return 0;
}
int NAME(cuModuleLoadData, hipModuleLoadData)(void** module, const void* image) {
  if (!depth_) return 201;
  if (mode_ != 2) return 900;
  NOTE(4, "load", "%.8s", (const char*)image);
  if (memcmp(image, "KERNEL", 6)) return 209;
  *module = (void*)(uintptr_t)(0x2000 + ++modules_);
  return 0;
}
int NAME(cuModuleUnload, hipModuleUnload)(void* module) { NOTE(5, "unload", "%p", module); return 0; }
int NAME(cuModuleGetFunction, hipModuleGetFunction)(void** function, void* module, const char* name) {
  NOTE(6, "function", "%s", name);
  if (strncmp(name, "portattn_", 9)) return 500;
  *function = (void*)((uintptr_t)module + 0x1000);
  return 0;
}
int NAME(cuFuncSetAttribute, hipFuncSetAttribute)(void* function, int attribute, int value) {
  NOTE(7, "attribute", "%d %d", attribute, value);
  return function ? 0 : 1;
}
int NAME(cuLaunchKernel, hipModuleLaunchKernel)(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                                unsigned shared, void* stream, void** params, void** extra) {
  NOTE(8, "launch", "grid %u %u %u block %u %u %u shared %u stream %p", gx, gy, gz, bx, by, bz, shared, stream);
  if (!f || extra || !params || !params[0] || gz != 1 || by != 1 || bz != 1) return 1;
  memcpy(params_, params[0], 384);
  if (params[1]) memcpy(maps_, params[1], sizeof maps_);
  return 0;
}
#ifndef HIP
/* CUDA's own, as cuda.h lays them out: CUlaunchAttribute is an id and, 8 bytes in, 64 bytes of value. */
typedef struct { int id; char pad[4]; union { char pad[64]; struct { unsigned x, y, z; } cluster; int overlap; } value; } Attribute;
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void* stream; Attribute* attributes; unsigned count; } Config;
int cuLaunchKernelEx(const Config* c, void* f, void** params, void** extra) {
  char said[100] = "";
  for (unsigned i = 0; i < c->count; ++i) {
    const Attribute* a = c->attributes + i;
    char* end = said + strlen(said);
    if (a->id == 4) sprintf(end, " cluster %u %u %u", a->value.cluster.x, a->value.cluster.y, a->value.cluster.z);
    else if (a->id == 6) sprintf(end, " overlapping %d", a->value.overlap);
    else return 1;
  }
  NOTE(9, "launch", "grid %u %u %u block %u %u %u shared %u stream %p%s", c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, said);
  if (!f || extra || !params || !params[0] || c->gz != 1 || c->by != 1 || c->bz != 1) return 1;
  memcpy(params_, params[0], 384);
  if (params[1]) memcpy(maps_, params[1], sizeof maps_);
  return 0;
}
int cuOccupancyMaxActiveClusters(int* clusters, void* function, const Config* c) {
  const char* most = getenv("FAKE_BLOCKS_IN_CLUSTERS");
  if (!depth_ || !function || c->count != 1 || c->attributes[0].id != 4) return 1;
  *clusters = (most ? atoi(most) : 128) / (int)c->attributes[0].value.cluster.y;
  return 0;
}
/* A map is where it was encoded from and which box, so that tests can read it in what a launch got. */
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const uint64_t* shape, const uint64_t* strides, const unsigned* box,
                           const unsigned* steps, int interleave, int swizzle, int promotion, int fill) {
  if ((uintptr_t)map % 64 || (uintptr_t)base % 16 || rank != 4 || interleave || swizzle != (type ? 3 : 0) || fill) return 1;
  for (unsigned i = 0; i < rank; ++i)
    if (!shape[i] || box[i] > 256 || steps[i] != 1 || (i + 1 < rank && strides[i] % 16)) return 1;
  NOTE(10, "map", "base %p type %d shape %u %u %u %u box %u %u", base, type, (unsigned)shape[0], (unsigned)shape[1], (unsigned)shape[2],
       (unsigned)shape[3], box[0], box[1]);
  memset(map, 0, 128);
  memcpy(map, &base, sizeof base);
  return 0;
}
#endif
int NAME(cuStreamGetCaptureInfo, hipStreamGetCaptureInfo)(void* stream, int* status, unsigned long long* id) {
  *status = stream == (void*)7;
  *id = 42;
  return 0;
}
#ifdef HIP
const char* hipGetErrorName(int code) { return code == 719 ? "hipErrorLaunchFailure" : "hipErrorOther"; }
const char* hipGetErrorString(int code) { return code == 719 ? "unspecified launch failure" : "other"; }
#else
int cuGetErrorName(int code, const char** text) { *text = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_OTHER"; return 0; }
int cuGetErrorString(int code, const char** text) { *text = code == 719 ? "unspecified launch failure" : "other"; return 0; }
#endif
