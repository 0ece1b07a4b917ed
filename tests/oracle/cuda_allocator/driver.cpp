// PyTorch's caching allocator, one request a line on standard input: "a KEY SIZE STREAM", "f KEY", "r KEY" (the tensor
// is used on stream 2 as well, and freed: its block comes back when somebody waits for that), "e" (empty_cache). After
// each line: allocated, reserved, num_alloc_retries, num_ooms.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <map>

using namespace c10::cuda;

namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(DeviceIndex));
}

int main() {
  _internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  detail::init_p2p_access_cache(1);
  CUDACachingAllocator::init(1);
  auto* allocator = CUDACachingAllocator::get();
  std::map<int, CUDAStream> streams;
  for (int i = 0; i < 8; i++) {
    streams.emplace(i, i ? getStreamFromPool(false, 0) : getDefaultCUDAStream(0));
  }
  std::map<long, c10::DataPtr> live;
  char what;
  while (std::scanf(" %c", &what) == 1) {
    long key = 0;
    unsigned long size = 0;
    int stream = 0;
    if (what != 'e' && std::scanf("%ld", &key) != 1) {
      return 2;
    }
    if (what == 'a') {
      if (std::scanf("%lu %d", &size, &stream) != 2) {
        return 2;
      }
      setCurrentCUDAStream(streams.at(stream));
      try {
        live[key] = allocator->allocate(size);
      } catch (const c10::OutOfMemoryError& error) {
        std::printf("# %s\n", error.what_without_backtrace());
      }
    } else if (what == 'f') {
      live.erase(key);
    } else if (what == 'r') {
      auto found = live.find(key);
      if (found != live.end()) {
        CUDACachingAllocator::recordStream(found->second, streams.at(2));
        live.erase(found);
      }
    } else {
      CUDACachingAllocator::emptyCache();
    }
    auto stats = CUDACachingAllocator::getDeviceStats(0);
    std::printf("%ld %ld %ld %ld\n", static_cast<long>(stats.allocated_bytes[0].current),
                static_cast<long>(stats.reserved_bytes[0].current), static_cast<long>(stats.num_alloc_retries),
                static_cast<long>(stats.num_ooms));
  }
  std::fflush(stdout);
  std::_Exit(0);
}
