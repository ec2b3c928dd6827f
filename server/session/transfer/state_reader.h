#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_STATE_READER_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_STATE_READER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "optstate/v1/types.pb.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/step_decider.h"
#include "server/session/transfer/element_access.h"

namespace optstate::session {

// Reads the state of a job at its committed step.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while
// records are read.
class StateReader {
 public:
  // The arguments must outlive this object.
  StateReader(JobContext* job, StepDecider* decider, Speculator* speculator)
      : job_(*job), decider_(*decider), speculator_(*speculator) {}

  absl::StatusOr<uint64_t> Fetch(v1::StateArray array, uint32_t parameter,
                                 uint64_t begin, uint64_t numel,
                                 absl::Span<std::byte> out);
  absl::Status Hint(ParameterHint hint, uint32_t first, uint32_t count);
  absl::Status ReadParameters(uint64_t offset_bytes, absl::Span<std::byte> out);

 private:
  absl::StatusOr<uint64_t> FetchPreparedSums(const ElementRange& range,
                                             absl::Span<std::byte> out) const;
  absl::Status ReadElements(const ElementRange& range,
                            absl::Span<std::byte> out) const;

  JobContext& job_;
  StepDecider& decider_;
  Speculator& speculator_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_STATE_READER_H_
