// A driver's library with one device, as pynvml loads it. Its answers change with each call of utilization.
#include <stdint.h>
#include <string.h>

typedef struct { unsigned gpu, memory; } Utilization;
typedef struct {
  uint32_t field, scope;
  int64_t timestamp, latency;
  int type, status;
  union { double d; unsigned long long ull; } value;
} Field;

static int num_open = 0, num_samples = 0;
static unsigned long long links_kib = 0;
static int device;

int fake_num_open(void) { return num_open; }
int fake_num_samples(void) { return num_samples; }

int nvmlInitWithFlags(unsigned flags) { ++num_open; return 0; }
int nvmlShutdown(void) { --num_open; return 0; }
const char* nvmlErrorString(int code) { return code == 6 ? "Not Found" : "Not Supported"; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  if (strcmp(uuid, "GPU-0123")) return 6;
  *handle = &device;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void* handle, Utilization* found) {
  found->gpu = num_samples++ % 2 ? 0 : 80;
  found->memory = 0;
  return 0;
}
int nvmlDeviceGetTemperature(void* handle, int sensor, unsigned* found) { *found = 61; return 0; }
int nvmlDeviceGetPowerUsage(void* handle, unsigned* found) { *found = 350500; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* found) {
  *found = num_samples % 2 ? 0x4 : 0x1;  // a power cap, or idleness
  return 0;
}
int nvmlDeviceGetPcieThroughput(void* handle, int counter, unsigned* found) {
  if (counter == 0) return 3;  // what is sent is not supported here
  *found = 2048;
  return 0;
}
int nvmlDeviceGetFieldValues(void* handle, int count, Field* found) {
  for (int i = 0; i < count; ++i) {
    if (found[i].scope != 0xFFFFFFFFu) return 2;
    links_kib += 1000;
    found[i].status = 0;
    found[i].value.ull = links_kib;
  }
  return 0;
}
