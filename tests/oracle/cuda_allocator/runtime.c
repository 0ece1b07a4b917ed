/* A CUDA runtime with nothing behind it but a count of bytes: cudaMalloc and cuMemCreate hand out rising addresses until
   STUB_LIMIT bytes are out, streams and events are numbers, and an event that waits for another stream is never done
   before somebody waits for it. Just enough for libc10_cuda.so. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#define GRANULARITY (2ull << 20)
#define MOST 65536

static uint64_t taken, next_address = 1ull << 40, next_number = 1;
static struct { uint64_t address, size; } held[MOST];
static int holds;
static cudaError_t last = cudaSuccess;

static uint64_t limit(void) { return strtoull(getenv("STUB_LIMIT"), 0, 10); }

static int take(uint64_t address, uint64_t size) {
  if (taken + size > limit() || holds == MOST) return 0;
  taken += size;
  held[holds].address = address;
  held[holds++].size = size;
  return 1;
}

static int give(uint64_t address) {
  for (int i = holds - 1; i >= 0; i--)
    if (held[i].address == address) {
      taken -= held[i].size;
      held[i] = held[--holds];
      return 1;
    }
  return 0;
}

/* -- the runtime -- */

cudaError_t cudaMalloc(void** pointer, size_t size) {
  uint64_t rounded = (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (!take(next_address, rounded)) return last = cudaErrorMemoryAllocation;
  *pointer = (void*)next_address;
  next_address += rounded + GRANULARITY;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) { return !pointer || give((uint64_t)pointer) ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = limit();
  *free = *total - taken;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
  cudaError_t found = last;
  last = cudaSuccess;
  return found;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "?"; }
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof *found);
  found->totalGlobalMem = limit();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = *greatest = 0; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = (cudaStream_t)(uintptr_t)(4096 * next_number++);
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** e, size_t* n) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = (cudaEvent_t)(uintptr_t)(4096 * next_number++);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return last = cudaErrorNotReady; }

#define NOTHING(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
NOTHING(cudaEventDestroy, cudaEvent_t e)
NOTHING(cudaEventRecord, cudaEvent_t e, cudaStream_t s)
NOTHING(cudaEventSynchronize, cudaEvent_t e)
NOTHING(cudaDeviceSynchronize, void)
NOTHING(cudaStreamQuery, cudaStream_t s)
NOTHING(cudaStreamSynchronize, cudaStream_t s)
NOTHING(cudaStreamWaitEvent, cudaStream_t s, cudaEvent_t e, unsigned f)

#define MISSING(name)                                                                                    \
  void missing_##name(void) __asm__(#name);                                                              \
  void missing_##name(void) { fprintf(stderr, #name " is not there\n"); abort(); }
MISSING(cudaDeviceCanAccessPeer)
MISSING(cudaDeviceEnablePeerAccess)
MISSING(cudaDeviceGetDefaultMemPool)
MISSING(cudaEventElapsedTime)
MISSING(cudaFreeAsync)
MISSING(cudaGraphNodeGetDependencies)
MISSING(cudaIpcCloseMemHandle)
MISSING(cudaIpcGetMemHandle)
MISSING(cudaIpcOpenMemHandle)
MISSING(cudaMallocAsync)
MISSING(cudaMemPoolGetAttribute)
MISSING(cudaMemPoolSetAccess)
MISSING(cudaMemPoolSetAttribute)
MISSING(cudaMemPoolTrimTo)
MISSING(cudaMemcpy)
MISSING(cudaMemcpyAsync)
MISSING(cudaMemcpyPeerAsync)

/* -- the driver's memory, for expandable segments -- */

static CUresult reserve(CUdeviceptr* pointer, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
  *pointer = next_address;
  next_address += (size + GRANULARITY) / GRANULARITY * GRANULARITY;
  return CUDA_SUCCESS;
}
static CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const void* properties, unsigned long long f) {
  if (!take(next_number, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = next_number++;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  return give(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
static CUresult granularity(size_t* found, const void* properties, int option) {
  *found = GRANULARITY;
  return CUDA_SUCCESS;
}
static CUresult nothing(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult* found) {
  *function = !strcmp(name, "cuMemAddressReserve") ? (void*)reserve
      : !strcmp(name, "cuMemCreate") ? (void*)create
      : !strcmp(name, "cuMemRelease") ? (void*)release
      : !strcmp(name, "cuMemGetAllocationGranularity") ? (void*)granularity
      : (void*)nothing;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

/* -- NVML, which says in messages what this process holds -- */

struct nvml_process {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) { *device = &taken; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, struct nvml_process* found) {
  *count = 1;
  found->pid = getpid();
  found->used = taken;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void) { return 0; }
