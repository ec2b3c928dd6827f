#ifndef OPTSTATE_SERVER_TRANSPORT_SESSION_TRAFFIC_H_
#define OPTSTATE_SERVER_TRANSPORT_SESSION_TRAFFIC_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "server/session/job_types.h"
#include "server/session/wire_counters.h"

namespace optstate::transport {

// Counts the bytes of one session, and the requests that it is refused.
// Counting allocates nothing.
//
// Threads: Attach() before any other; all else by any thread.
class SessionTraffic {
 public:
  // `counts` are those of the session's wire; null: nothing is counted.
  explicit SessionTraffic(session::WireCounters::Counts* counts)
      : counts_(counts) {}

  // Notes the gradients of the rank that attaches. `published_bytes` of
  // parameters are published with each step where the rank reads them.
  void Attach(const Layout& layout, const RankPartition& partition,
              uint64_t published_bytes);

  // The job has taken a push of these parameters.
  void CountPush(uint32_t first_parameter, uint32_t parameter_count) const;
  // Counts the parameters of an applied step as sent to a rank that reads them
  // where they are published.
  void CountPublished(const absl::Status& status,
                      const session::StepOutcome& outcome) const;
  // Counts an answer that refuses what it answers.
  void CountAnswer(const absl::Status& status) const {
    if (!status.ok() && counts_ != nullptr) counts_->AddRefused(status.code());
  }
  void CountSent(uint64_t bytes) const {
    if (counts_ != nullptr) counts_->AddSent(bytes);
  }
  void CountLoaded(uint64_t bytes) const {
    if (counts_ != nullptr) counts_->AddLoaded(bytes);
  }

  session::WireCounters::Counts* counts() const { return counts_; }

 private:
  session::WireCounters::Counts* const counts_;
  // Bytes of the rank's gradients of all parameters before each, and of all.
  std::vector<uint64_t> gradient_bytes_before_;
  uint64_t published_bytes_ = 0;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SESSION_TRAFFIC_H_
