#ifndef OPTSTATE_SERVER_SESSION_TESTING_DEVICE_JOBS_H_
#define OPTSTATE_SERVER_SESSION_TESTING_DEVICE_JOBS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/session/testing/job_harness.h"

// Jobs of which devices update a part, for tests.

namespace optstate::session {

inline constexpr uint64_t kSeed = 23;

inline JobHarness::Setup SetupOf(double fraction,
                                 v1::Placement placement = v1::PLACEMENT_HOST) {
  JobHarness::Setup setup;
  setup.layout.groups.resize(1);
  setup.layout.parameters = {
      MakeParameter("a", 30000),
      MakeParameter("b", 7001, 0, DType::kBFloat16, DType::kBFloat16),
      MakeParameter("c", 3)};
  setup.storage.set_placement(placement);
  setup.storage.set_offload_fraction(fraction);
  setup.devices = "emulated:2";
  return setup;
}

inline void TakeSteps(JobHarness* job, uint64_t first, uint64_t last) {
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  for (uint64_t step = first; step <= last; ++step) {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    job->Step(step, job->RandomTensors(kSeed + step), spec);
  }
}

inline absl::StatusOr<v1::SetJobReply> SetFraction(JobHarness* job,
                                                   double fraction) {
  v1::SetJobRequest request;
  request.set_offload_fraction(fraction);
  return job->job().Set(request);
}

// A job of which records can stay on devices.
inline JobHarness::Setup KeepingSetup(uint64_t device_budget) {
  JobHarness::Setup setup = SetupOf(0);
  for (ParameterSpec& parameter : setup.layout.parameters) {
    parameter.dtype = DType::kBFloat16;
    parameter.gradient_dtype = DType::kBFloat16;
  }
  setup.storage.set_device_budget_bytes(device_budget);
  return setup;
}

inline absl::StatusOr<v1::SetJobReply> SetBudget(JobHarness* job,
                                                 uint64_t bytes) {
  v1::SetJobRequest request;
  request.set_device_budget_bytes(bytes);
  return job->job().Set(request);
}

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_DEVICE_JOBS_H_
