#include "server/metrics/counter_samples.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/metrics/code_label.h"
#include "server/observe/counters.h"

namespace optstate::metrics {
namespace {

using observe::Answered;
using observe::Counted;
using observe::Queue;

bool IsCommon(Answered what, absl::StatusCode code) {
  if (code == absl::StatusCode::kOk) return what == Answered::kAdminCall;
  return std::find(std::begin(kCommonCodes), std::end(kCommonCodes), code) !=
         std::end(kCommonCodes);
}

// Adds a sample for each code: `labels` and "code", "resource_exhausted".
void AddAnswers(Metric metric, Answered what, const Labels& labels,
                Samples* samples) {
  for (size_t number = 0; number < observe::kCodes; ++number) {
    const auto code = static_cast<absl::StatusCode>(number);
    const uint64_t count = observe::CountOf(what, code);
    if (count == 0 && !IsCommon(what, code)) continue;
    Labels all = labels;
    all.push_back(CodeLabel(code));
    samples->Add(metric, static_cast<double>(count), std::move(all));
  }
}

}  // namespace

void AddCounters(Samples* samples) {
  const auto add = [samples](Metric metric, Counted what, Labels labels = {}) {
    samples->Add(metric, static_cast<double>(observe::CountOf(what)),
                 std::move(labels));
  };
  add(Metric::kConnectionsAccepted, Counted::kConnectionAccepted);
  AddAnswers(Metric::kConnectionsRefused, Answered::kSession,
             {{"wire", "session"}}, samples);
  AddAnswers(Metric::kConnectionsRefused, Answered::kGrpcConnection,
             {{"wire", "grpc"}}, samples);
  add(Metric::kSessionsStarted, Counted::kSessionHandedOver);
  AddAnswers(Metric::kAdminCalls, Answered::kAdminCall, {}, samples);
  add(Metric::kEngineStarts, Counted::kEngineStarted, {{"how", "started"}});
  add(Metric::kEngineStarts, Counted::kEngineAdopted, {{"how", "adopted"}});
  add(Metric::kEngineExits, Counted::kEngineStopped, {{"cause", "stopped"}});
  add(Metric::kEngineExits, Counted::kEngineReplaced, {{"cause", "replaced"}});
  add(Metric::kEngineExits, Counted::kEngineDied, {{"cause", "died"}});
  add(Metric::kEngineKills, Counted::kEngineKilled);
  add(Metric::kLogLinesLeftOut, Counted::kLogLineLeftOut);
  const std::pair<const char*, Queue> queues[] = {
      {"handshakes", Queue::kHandshake},
      {"engine_waits", Queue::kEngine},
      {"removals", Queue::kRemoval}};
  for (const auto& [name, queue] : queues) {
    samples->Add(Metric::kQueueDepth,
                 static_cast<double>(observe::LengthOf(queue)),
                 {{"queue", name}});
  }
}

}  // namespace optstate::metrics
