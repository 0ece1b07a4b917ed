/* What a training asks of CUDA and cuBLAS beside memory (../cuda_allocator/runtime.c), of an H200 that computes nothing:
   kernels and products end at once, and what is read back from the device is 0. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <cuda_runtime_api.h>
static size_t limit(void){ return strtoull(getenv("STUB_LIMIT"),0,10);}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int d){ memset(p,0,sizeof *p); strcpy(p->name,"NVIDIA H200"); p->totalGlobalMem=limit(); p->major=9; p->minor=0; p->multiProcessorCount=132; p->maxThreadsPerMultiProcessor=2048; p->maxThreadsPerBlock=1024; p->warpSize=32; p->sharedMemPerBlock=49152; p->sharedMemPerBlockOptin=232448; p->sharedMemPerMultiprocessor=233472; p->regsPerBlock=65536; p->regsPerMultiprocessor=65536; p->maxBlocksPerMultiProcessor=32; p->l2CacheSize=62914560; for(int i=0;i<3;i++){p->maxThreadsDim[i]=i<2?1024:64; p->maxGridSize[i]=i?65535:2147483647;} return 0;}
cudaError_t cudaDeviceGetAttribute(int* v, enum cudaDeviceAttr a, int d){ switch(a){case cudaDevAttrMultiProcessorCount:*v=132;break; case cudaDevAttrComputeCapabilityMajor:*v=9;break; case cudaDevAttrComputeCapabilityMinor:*v=0;break; case cudaDevAttrMaxSharedMemoryPerBlockOptin:*v=232448;break; case cudaDevAttrMaxSharedMemoryPerBlock:*v=49152;break; case cudaDevAttrMaxThreadsPerMultiProcessor:*v=2048;break; case cudaDevAttrMaxThreadsPerBlock:*v=1024; break; case cudaDevAttrWarpSize:*v=32;break; default:*v=1024;} return 0;}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n,const void*f,int b,size_t s){*n=2;return 0;}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n,const void*f,int b,size_t s,unsigned fl){*n=2;return 0;}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* a,const void*f){memset(a,0,sizeof *a);a->maxThreadsPerBlock=1024;a->numRegs=32;a->ptxVersion=90;a->binaryVersion=90;return 0;}
cudaError_t cudaHostAlloc(void**p,size_t n,unsigned f){*p=calloc(1,n);return 0;}
cudaError_t cudaMallocHost(void**p,size_t n){*p=calloc(1,n);return 0;}
cudaError_t cudaMallocManaged(void**p,size_t n,unsigned f){*p=calloc(1,n);return 0;}
int prefetched(void) __asm__("cudaMemPrefetchAsync");
int prefetched(void){return 0;}
cudaError_t cudaFreeHost(void*p){free(p);return 0;}
cudaError_t cudaMemcpyAsync(void*d,const void*s,size_t n,enum cudaMemcpyKind k,cudaStream_t st){ if(k==cudaMemcpyDeviceToHost) memset(d,0,n); return 0;}
cudaError_t cudaMemcpy(void*d,const void*s,size_t n,enum cudaMemcpyKind k){ if(k==cudaMemcpyDeviceToHost) memset(d,0,n); return 0;}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes*a,const void*p){memset(a,0,sizeof *a); a->type=cudaMemoryTypeDevice; return 0;}
cudaError_t cudaEventElapsedTime(float*m,cudaEvent_t a,cudaEvent_t b){*m=1.0f;return 0;}
cudaError_t cudaEventQuery(cudaEvent_t e){return 0;}
cudaError_t cudaRuntimeGetVersion(int*v){*v=13000;return 0;}
cudaError_t cudaDeviceCanAccessPeer(int*v,int a,int b){*v=0;return 0;}
void** __cudaRegisterFatBinary(void*b){static void*x[64];return x;}
int __cudaPushCallConfiguration(){return 0;}
static int handle[4096];
static int made; int cublasCreate_v2(void**h){*h=handle+16*++made;return 0;}
int cublasLtCreate(void**h){*h=handle;return 0;}
int cublasGetMathMode(void*h,int*m){*m=0;return 0;}
int cublasGetVersion_v2(void*h,int*v){*v=130000;return 0;}
int cublasGetPointerMode_v2(void*h,int*m){*m=0;return 0;}
size_t cublasLtGetVersion(void){return 130000;}
int cublasLtMatmulDescCreate(void**d,int a,int b){*d=handle;return 0;}
int cublasLtMatrixLayoutCreate(void**d){*d=handle;return 0;}
int cublasLtMatmulPreferenceCreate(void**d){*d=handle;return 0;}
int cublasLtMatmulAlgoGetHeuristic(void*a,void*b,void*c,void*d,void*e,void*f,void*g,int n,void*r,int*found){*found=1;memset(r,0,64);return 0;}
