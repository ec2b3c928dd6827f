#ifndef OPTSTATE_SERVER_SESSION_WIRE_COUNTERS_H_
#define OPTSTATE_SERVER_SESSION_WIRE_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "optstate/v1/admin.pb.h"
#include "server/observe/counters.h"

namespace optstate::session {

// Counts the bytes that pass between ranks and an engine, and the requests that
// the engine refuses, by wire, since the engine started; knows the queues of
// the sessions that are attached. See v1::WireBytes.
//
// Threads: thread-safe. Counting takes no lock and allocates nothing.
class WireCounters {
 public:
  enum class Wire : size_t { kShm, kGrpc, kEnd };

  // The lengths of one session's queues.
  struct QueueLengths {
    uint64_t requests = 0;  // that have come and are not carried out
    uint64_t replies = 0;   // that the rank has not read
  };
  // Called by any thread, and waits for nothing.
  using Queues = std::function<QueueLengths()>;

  // Counters of one wire, a cache line each: ranks count at the same time.
  struct alignas(64) Counts {
    std::atomic<uint64_t> gradient_bytes{0};
    std::atomic<uint64_t> sent_bytes{0};
    std::atomic<uint64_t> load_bytes{0};
    std::array<std::atomic<uint64_t>, observe::kCodes> refused{};  // by code

    void AddGradients(uint64_t bytes) { Add(bytes, &gradient_bytes); }
    void AddSent(uint64_t bytes) { Add(bytes, &sent_bytes); }
    void AddLoaded(uint64_t bytes) { Add(bytes, &load_bytes); }
    // A request was refused with this code.
    void AddRefused(absl::StatusCode code) {
      Add(1, &refused[observe::NumberOf(code)]);
    }

   private:
    static void Add(uint64_t bytes, std::atomic<uint64_t>* to) {
      to->fetch_add(bytes, std::memory_order_relaxed);
    }
  };

  // Returns the counters of a wire by its name, "shm" or "grpc".
  Counts* Of(absl::string_view wire) { return &counts_[NumberOf(wire)]; }

  // Has Describe() ask for the queues of a session over this wire until
  // RemoveSession() returns; they outlive that.
  void AddSession(absl::string_view wire, const Queues* queues)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    sessions_.emplace_back(NumberOf(wire), queues);
  }
  void RemoveSession(const Queues* queues) ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    std::erase_if(sessions_, [queues](const auto& session) {
      return session.second == queues;
    });
  }

  // Adds the wires that have sessions, or over which something has passed.
  void Describe(v1::Job* job) const ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    for (size_t i = 0; i < counts_.size(); ++i) {
      v1::WireBytes wire;
      DescribeCounts(counts_[i], &wire);
      for (const auto& [number, queues] : sessions_) {
        if (number != i) continue;
        wire.set_wire(kNames[i]);
        const QueueLengths lengths = (*queues)();
        wire.set_requests_waiting(wire.requests_waiting() + lengths.requests);
        wire.set_replies_waiting(wire.replies_waiting() + lengths.replies);
      }
      if (wire.ByteSizeLong() == 0) continue;
      wire.set_wire(kNames[i]);
      *job->add_wires() = std::move(wire);
    }
  }

 private:
  static constexpr const char* kNames[] = {"shm", "grpc"};

  static size_t NumberOf(absl::string_view wire) {
    return static_cast<size_t>(wire == "shm" ? Wire::kShm : Wire::kGrpc);
  }

  static void DescribeCounts(const Counts& counts, v1::WireBytes* wire) {
    const auto read = [](const std::atomic<uint64_t>& count) {
      return count.load(std::memory_order_relaxed);
    };
    wire->set_gradient_bytes(read(counts.gradient_bytes));
    wire->set_sent_bytes(read(counts.sent_bytes));
    wire->set_load_bytes(read(counts.load_bytes));
    for (size_t number = 0; number < observe::kCodes; ++number) {
      const uint64_t requests = read(counts.refused[number]);
      if (requests == 0) continue;
      v1::RefusedRequests* refused = wire->add_refused();
      refused->set_code(absl::AsciiStrToLower(
          absl::StatusCodeToString(static_cast<absl::StatusCode>(number))));
      refused->set_requests(requests);
    }
  }

  mutable absl::Mutex mutex_;
  // The number of the wire, and the queues, of each.
  std::vector<std::pair<size_t, const Queues*>> sessions_
      ABSL_GUARDED_BY(mutex_);
  std::array<Counts, static_cast<size_t>(Wire::kEnd)> counts_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_WIRE_COUNTERS_H_
