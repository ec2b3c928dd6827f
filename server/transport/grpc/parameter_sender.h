#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_PARAMETER_SENDER_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_PARAMETER_SENDER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/area_parts.h"
#include "proto/types/unique_fd.h"
#include "server/session/wire_counters.h"

namespace optstate::transport {

// Sends one rank the parameters of a step while the update runs: each part once
// all its runs are stamped with the step, the rest before the outcome.
//
// Reads the job's files through mappings of its own, which stay valid whatever
// the job does meanwhile: no lock of the job is taken.
//
// Threads: Open() and Begin() on the thread that reads requests, the others on
// the thread that writes replies.
class ParameterSender {
 public:
  // Writes a reply to the peer, waiting for room; false: the peer is gone.
  using Write = absl::FunctionRef<bool(const v1::SessionReply&)>;

  // Counts what is sent; null: nothing is counted. Called before the first
  // Begin().
  void CountInto(session::WireCounters::Counts* counts) { counts_ = counts; }
  // Takes the job's files, as they are sent to ranks in shared memory, and
  // their sizes. Without `run_stamps` no part is known to be ready before the
  // outcome. Called before the first Begin().
  absl::Status Open(UniqueFd parameters, uint64_t parameter_area_bytes,
                    UniqueFd run_stamps, uint64_t run_count,
                    std::vector<AreaPart> parts);
  // Notes that a commit of `step` wants its parameters. Called before any
  // thread can answer the commit.
  void Begin(uint64_t request_id, uint64_t step) ABSL_LOCKS_EXCLUDED(mutex_);

  // The time of the next SendReady(): at intervals while a commit is awaited.
  absl::Time NextLook() ABSL_LOCKS_EXCLUDED(mutex_);
  // Sends the parts that are ready; false: the peer is gone.
  bool SendReady(Write write);
  // Sends the remaining parts, and says so in the reply, if that is the outcome
  // of the commit and the step was applied. The caller then writes `reply`.
  bool SendRest(v1::SessionReply* reply, Write write);

 private:
  struct Commit {
    uint64_t request_id = 0;
    uint64_t step = 0;
  };
  // Returns the awaited commit; nullptr: none.
  const Commit* Awaited() ABSL_LOCKS_EXCLUDED(mutex_);
  bool IsReady(const AreaPart& part) const;
  bool Send(const AreaPart& part, Write write);

  shm::PeerSegment parameters_;
  std::optional<shm::PeerSegment> run_stamps_;
  std::vector<AreaPart> parts_;
  session::WireCounters::Counts* counts_ = nullptr;

  absl::Mutex mutex_;
  std::optional<Commit> next_ ABSL_GUARDED_BY(mutex_);

  std::optional<Commit> awaited_;
  std::vector<size_t> left_;  // unsent parts of the step
  absl::Duration pause_;
  v1::SessionReply chunk_;  // reused
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_PARAMETER_SENDER_H_
