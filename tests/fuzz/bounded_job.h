#ifndef OPTSTATE_TESTS_FUZZ_BOUNDED_JOB_H_
#define OPTSTATE_TESTS_FUZZ_BOUNDED_JOB_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "server/session/job_description.h"
#include "server/transport/fake_job.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {

// A FakeJob with the checks that a real job makes when it is registered, and
// with a limit in place of admission. It touches each byte that it is given.
//
// Threads: thread-safe.
class BoundedJob : public transport::FakeJob {
 public:
  static constexpr uint64_t kAreaBytesMax = uint64_t{1} << 20;
  static constexpr uint32_t kRanksMax = 16;

  absl::StatusOr<session::RegisterResult> Register(
      const session::RegisterSpec& spec) override {
    OPTSTATE_RETURN_IF_ERROR(session::DescriptionOf(spec).status());
    if (spec.layout.parameter_area_bytes() > kAreaBytesMax ||
        spec.layout.element_count() > kAreaBytesMax ||
        spec.world_size > kRanksMax) {
      return absl::ResourceExhaustedError("larger than a fuzz target allows");
    }
    return FakeJob::Register(spec);
  }
  void Decide(uint32_t of_rank, uint64_t request_id,
              const StepVerdict& /*verdict*/) override {
    rank(of_rank).attach.listener->OnStepDone(
        request_id, absl::FailedPreconditionError("nothing is prepared"), {});
  }
  absl::Status Load(uint32_t /*rank*/, v1::StateArray /*array*/,
                    uint32_t /*parameter*/, uint64_t /*begin*/, uint64_t numel,
                    DType dtype, absl::Span<const std::byte> data) override {
    // Has a sanitizer look at each byte.
    const std::vector<std::byte> copy(data.begin(), data.end());
    Require(copy.size() / SizeInBytes(dtype) >= numel,
            "a load has the bytes of its elements");
    return absl::OkStatus();
  }
  absl::StatusOr<uint64_t> Fetch(v1::StateArray /*array*/,
                                 uint32_t /*parameter*/, uint64_t /*begin*/,
                                 uint64_t numel,
                                 absl::Span<std::byte> out) override {
    Require(out.size() / 2 >= numel, "a fetch has room for its elements");
    std::fill(out.begin(), out.end(), std::byte{1});
    return committed_step();
  }
};

}  // namespace optstate::fuzz

#endif  // OPTSTATE_TESTS_FUZZ_BOUNDED_JOB_H_
