#ifndef OPTSTATE_SERVER_CONFIG_JOB_WEIGHT_H_
#define OPTSTATE_SERVER_CONFIG_JOB_WEIGHT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/config.pb.h"

namespace optstate::config {

// Weights of jobs, see EngineSettings.weight.

inline constexpr uint32_t kWeightMax = 10000;
inline bool IsWeight(uint32_t weight) {
  return weight >= 1 && weight <= kWeightMax;
}

struct JobWeight {
  std::string pattern;
  uint32_t weight = 0;
};

// Parses "eval-*=25". INVALID_ARGUMENT: the text is no weight.
absl::StatusOr<JobWeight> ParseJobWeight(absl::string_view text);

// Returns the job's weight by a configuration that was checked.
uint32_t WeightOf(const v1::EngineSettings& settings, const std::string& job);
// Returns the largest weight that the configuration gives to any job.
uint32_t LargestWeight(const v1::EngineSettings& settings);

// Returns the steps of nice values between a job of this weight and one of
// weight 100, positive for a smaller weight. The kernel gives a process 1.25
// times the time for each step down.
int NiceSteps(double weight);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_JOB_WEIGHT_H_
