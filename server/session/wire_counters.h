#ifndef OPTSTATE_SERVER_SESSION_WIRE_COUNTERS_H_
#define OPTSTATE_SERVER_SESSION_WIRE_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::session {

// Counts the bytes that pass between ranks and an engine, by wire, since the
// engine started; see v1::WireBytes.
//
// Threads: thread-safe, without a lock. Counting allocates nothing.
class WireCounters {
 public:
  enum class Wire : size_t { kShm, kGrpc, kEnd };

  // Counters of one wire, a cache line each: ranks count at the same time.
  struct alignas(64) Counts {
    std::atomic<uint64_t> gradient_bytes{0};
    std::atomic<uint64_t> sent_bytes{0};
    std::atomic<uint64_t> load_bytes{0};

    void AddGradients(uint64_t bytes) { Add(bytes, &gradient_bytes); }
    void AddSent(uint64_t bytes) { Add(bytes, &sent_bytes); }
    void AddLoaded(uint64_t bytes) { Add(bytes, &load_bytes); }

   private:
    static void Add(uint64_t bytes, std::atomic<uint64_t>* to) {
      to->fetch_add(bytes, std::memory_order_relaxed);
    }
  };

  // Returns the counters of a wire by its name, "shm" or "grpc".
  Counts* Of(absl::string_view wire) {
    return &counts_[static_cast<size_t>(wire == "shm" ? Wire::kShm
                                                      : Wire::kGrpc)];
  }

  // Adds the wires over which something has passed.
  void Describe(v1::Job* job) const {
    static constexpr const char* kNames[] = {"shm", "grpc"};
    for (size_t i = 0; i < counts_.size(); ++i) {
      const auto read = [](const std::atomic<uint64_t>& count) {
        return count.load(std::memory_order_relaxed);
      };
      const uint64_t gradients = read(counts_[i].gradient_bytes);
      const uint64_t sent = read(counts_[i].sent_bytes);
      const uint64_t loaded = read(counts_[i].load_bytes);
      if (gradients == 0 && sent == 0 && loaded == 0) continue;
      v1::WireBytes* wire = job->add_wires();
      wire->set_wire(kNames[i]);
      wire->set_gradient_bytes(gradients);
      wire->set_sent_bytes(sent);
      wire->set_load_bytes(loaded);
    }
  }

 private:
  std::array<Counts, static_cast<size_t>(Wire::kEnd)> counts_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_WIRE_COUNTERS_H_
