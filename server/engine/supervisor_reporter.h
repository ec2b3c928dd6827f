#ifndef OPTSTATE_SERVER_ENGINE_SUPERVISOR_REPORTER_H_
#define OPTSTATE_SERVER_ENGINE_SUPERVISOR_REPORTER_H_

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "optstate/v1/engine.pb.h"
#include "server/engine/supervisor_link.h"
#include "server/session/recovery/gradient_keeper.h"

namespace optstate::engine {

// Keeps the supervisor, and each one after it, informed of the memory that
// holds the ranks' gradients, that the engine is ready and that the job is
// over. Reports are sent at once; a report that the supervisor does not take
// just now, or that finds none, is sent later.
//
// Gradients go before Ready, so that a supervisor that receives Ready knows
// all.
//
// Threads: thread-safe.
class SupervisorReporter : public session::GradientKeeper {
 public:
  // `link` outlives the object.
  explicit SupervisorReporter(SupervisorLink* link);

  // Takes the gradients kept of the previous engine, to be kept further.
  // Duplicates the fds.
  void Seed(const std::vector<session::KeptGradients>& kept);

  void Keep(uint32_t rank, uint64_t client_instance,
            uint64_t gradient_offset_bytes, int segment_fd) override;
  void Drop(uint32_t rank) override;

  // Reports everything, including that the engine is ready, to a new
  // supervisor.
  void ReportAll(v1::EngineEvent::Ready ready);
  void SetFinished();
  // Sends waiting reports; called when the supervisor takes more.
  void Flush();

 private:
  struct Kept {
    v1::KeptGradientsInfo info;
    UniqueFd segment;
  };

  bool Put(uint32_t rank, uint64_t client_instance,
           uint64_t gradient_offset_bytes, int segment_fd)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool SendRank(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FlushLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SupervisorLink* const link_;
  absl::Mutex mutex_;
  std::map<uint32_t, Kept> kept_ ABSL_GUARDED_BY(mutex_);
  bool is_finished_ ABSL_GUARDED_BY(mutex_) = false;
  v1::EngineEvent ready_ ABSL_GUARDED_BY(mutex_);
  // Ranks whose report has not been sent to the supervisor.
  std::set<uint32_t> unsent_ranks_ ABSL_GUARDED_BY(mutex_);
  bool unsent_ready_ ABSL_GUARDED_BY(mutex_) = false;
  bool unsent_finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_SUPERVISOR_REPORTER_H_
