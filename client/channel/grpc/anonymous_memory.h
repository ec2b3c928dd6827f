#ifndef OPTSTATE_CLIENT_CHANNEL_GRPC_ANONYMOUS_MEMORY_H_
#define OPTSTATE_CLIENT_CHANNEL_GRPC_ANONYMOUS_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace optstate::client {

// Zeroed, page-aligned memory of this process alone, on huge pages where the
// system provides them. The destructor frees the memory.
class AnonymousMemory {
 public:
  AnonymousMemory() = default;
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;
  ~AnonymousMemory();

  // Allocates the memory; is called at most once. RESOURCE_EXHAUSTED: there is
  // no address space.
  absl::Status Allocate(uint64_t bytes);
  // Gives back the whole pages within bytes [begin, end), which are zeros then.
  void Release(uint64_t begin, uint64_t end);
  absl::Span<std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_GRPC_ANONYMOUS_MEMORY_H_
