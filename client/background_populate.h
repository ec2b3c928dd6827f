#ifndef OPTSTATE_CLIENT_BACKGROUND_POPULATE_H_
#define OPTSTATE_CLIENT_BACKGROUND_POPULATE_H_

#include <atomic>
#include <cstddef>
#include <thread>

#include "absl/types/span.h"

namespace optstate::client {

// Maps the pages of already reserved memory on a thread of its own, so that
// neither an attach nor the first gradients wait for page faults. This is only
// a hint: a page that the thread does not reach is mapped when it is first
// written.
class BackgroundPopulate {
 public:
  BackgroundPopulate() = default;
  BackgroundPopulate(const BackgroundPopulate&) = delete;
  BackgroundPopulate& operator=(const BackgroundPopulate&) = delete;
  // Stops the thread, however far it has come.
  ~BackgroundPopulate();

  // Starts the thread; is called at most once. `memory` starts at a page
  // boundary and outlives this object.
  void Start(absl::Span<std::byte> memory);

 private:
  void Run(absl::Span<std::byte> memory) const;

  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_BACKGROUND_POPULATE_H_
