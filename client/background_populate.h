#ifndef OPTSTATE_CLIENT_BACKGROUND_POPULATE_H_
#define OPTSTATE_CLIENT_BACKGROUND_POPULATE_H_

#include <atomic>
#include <cstddef>
#include <thread>

#include "absl/types/span.h"

namespace optstate::client {

// Maps the pages of memory that is reserved already, on a thread of its own, so
// that neither an attach nor the first gradients wait for the faults. A hint:
// what it does not reach is mapped when it is first written.
class BackgroundPopulate {
 public:
  BackgroundPopulate() = default;
  BackgroundPopulate(const BackgroundPopulate&) = delete;
  BackgroundPopulate& operator=(const BackgroundPopulate&) = delete;
  // Stops, wherever it is.
  ~BackgroundPopulate();

  // Once. `memory` starts at a page and outlives this.
  void Start(absl::Span<std::byte> memory);

 private:
  void Run(absl::Span<std::byte> memory) const;

  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_BACKGROUND_POPULATE_H_
