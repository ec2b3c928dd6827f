#include "tests/load/soak_report.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/load/quantiles.h"

namespace optstate::load {
namespace {

constexpr double kMiB = 1 << 20;
// Each third of a soak may have so much more than the one before: fds of
// connections that end a little later than others; of memory, a part of what
// was there first, and some pages of threads and buffers.
constexpr double kFdsAllowance = 8;
constexpr double kMemoryAllowancePart = 0.01;
constexpr double kMemoryAllowanceBytes = 4 * kMiB;

double MedianOf(std::vector<double> numbers) {
  const auto middle =
      numbers.begin() + static_cast<ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

std::vector<double> MediansOfThirds(const std::vector<double>& samples) {
  const size_t size = samples.size();
  std::vector<double> medians;
  for (size_t third = 0; third < 3; ++third) {
    const auto at = [&](size_t part) {
      return samples.begin() + static_cast<ptrdiff_t>(size * part / 3);
    };
    medians.push_back(MedianOf(std::vector<double>(at(third), at(third + 1))));
  }
  return medians;
}

// One kind of process, as it is called and as a sample has it.
struct Kind {
  const char* name;
  ProcessCosts CostSample::*costs;
};
constexpr Kind kKinds[] = {{"supervisor", &CostSample::supervisor},
                           {"engines", &CostSample::engines}};

std::vector<double> FdsOf(const std::vector<CostSample>& samples,
                          ProcessCosts CostSample::*costs) {
  std::vector<double> fds;
  for (const CostSample& sample : samples) {
    fds.push_back(static_cast<double>((sample.*costs).fds));
  }
  return fds;
}

std::vector<double> MemoryOf(const std::vector<CostSample>& samples,
                             ProcessCosts CostSample::*costs) {
  std::vector<double> bytes;
  for (const CostSample& sample : samples) {
    bytes.push_back(static_cast<double>((sample.*costs).private_bytes));
  }
  return bytes;
}

void AddGrowth(const std::vector<CostSample>& samples, const Kind& kind,
               std::vector<std::string>* problems) {
  const std::vector<double> fds = FdsOf(samples, kind.costs);
  if (GrowsSteadily(fds, kFdsAllowance)) {
    const std::vector<double> medians = MediansOfThirds(fds);
    problems->push_back(absl::StrFormat(
        "fds of the %s grow: %.0f, %.0f, %.0f in the thirds of the soak",
        kind.name, medians[0], medians[1], medians[2]));
  }
  const std::vector<double> memory = MemoryOf(samples, kind.costs);
  const std::vector<double> medians = MediansOfThirds(memory);
  if (GrowsSteadily(
          memory, kMemoryAllowanceBytes + kMemoryAllowancePart * medians[0])) {
    problems->push_back(absl::StrFormat(
        "private memory of the %s grows: %.1f, %.1f, %.1f MiB in the thirds of "
        "the soak",
        kind.name, medians[0] / kMiB, medians[1] / kMiB, medians[2] / kMiB));
  }
}

// A refusal because the caller has too many calls under way is an answer.
void AddCalls(const AdminTally& calls, std::vector<std::string>* problems) {
  if (!calls.wrong.empty()) problems->push_back(calls.wrong);
  if (calls.answered() == 0) problems->push_back("no call was answered");
  for (const auto& [code, count] : calls.refused) {
    if (code == absl::StatusCode::kResourceExhausted) continue;
    problems->push_back(absl::StrCat(count, " calls ended with ",
                                     absl::StatusCodeToString(code)));
  }
}

std::string SampleText(const char* when, const CostSample& sample) {
  return absl::StrCat("costs ", when, ":", sample.ToString(), "\n");
}

}  // namespace

bool GrowsSteadily(const std::vector<double>& samples, double allowance) {
  if (samples.size() < 3) return false;
  const std::vector<double> medians = MediansOfThirds(samples);
  return medians[1] > medians[0] + allowance &&
         medians[2] > medians[1] + allowance;
}

std::vector<std::string> SoakReport::Problems(double p99_ratio_max) const {
  std::vector<std::string> problems;
  if (samples.size() < kSamplesMin) {
    problems.push_back(absl::StrCat("only ", samples.size(),
                                    " samples of the costs, and it takes ",
                                    kSamplesMin, " to tell: soak longer"));
  } else {
    for (const Kind& kind : kKinds) AddGrowth(samples, kind, &problems);
  }
  const double before = QuantilesOf(steps_before_ms).p99_ms;
  const double after = QuantilesOf(steps_after_ms).p99_ms;
  if (after > p99_ratio_max * before) {
    problems.push_back(absl::StrFormat(
        "p99 of steps alone is %.3f ms after the soak and %.3f ms before: more "
        "than %.2f times as long",
        after, before, p99_ratio_max));
  }
  AddCalls(calls, &problems);
  return problems;
}

std::string SoakReport::ToString() const {
  std::string text = absl::StrCat(samples.size(), " samples of the costs\n");
  if (!samples.empty()) {
    absl::StrAppend(&text, SampleText("first", samples.front()),
                    SampleText("last", samples.back()));
  }
  absl::StrAppend(
      &text, "steps before the soak: ", QuantilesOf(steps_before_ms).ToString(),
      "\nsteps during the soak: ", QuantilesOf(steps_ms).ToString(),
      "\nsteps after the soak: ", QuantilesOf(steps_after_ms).ToString(),
      "\ncalls during the soak: ", calls.ToString(),
      absl::StrFormat("\np99 of steps after the soak / before: %.2f\n",
                      P99Ratio(steps_after_ms, steps_before_ms)));
  return text;
}

}  // namespace optstate::load
