#ifndef OPTSTATE_CLIENT_CTL_CHROME_TRACE_H_
#define OPTSTATE_CLIENT_CTL_CHROME_TRACE_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// Returns the text as a string of JSON, with its quotes.
std::string JsonString(absl::string_view text);

// Renders a trace in the Trace Event Format, which Perfetto and
// chrome://tracing read, piece by piece: Begin(), Add() for each chunk, End().
// All pieces in this order are one object of JSON, however many chunks there
// are. Groups of lanes are its processes, lanes its threads, spans complete
// events.
class ChromeTrace {
 public:
  explicit ChromeTrace(std::string job) : job_(std::move(job)) {}

  std::string Begin();
  // INTERNAL: a span is of no lane that was announced, or has impossible times.
  absl::StatusOr<std::string> Add(const v1::TraceChunk& chunk);
  std::string End() const;

  uint64_t spans() const { return spans_; }
  uint64_t lost_spans() const { return lost_spans_; }
  uint32_t steps() const { return steps_; }
  bool done() const { return done_; }

 private:
  struct Lane {
    std::string group;
    int process = 0;
  };

  void AddEvent(absl::string_view event, std::string* text);
  void AddLane(const v1::TraceLane& lane, std::string* text);
  absl::Status AddSpan(const v1::TraceSpan& span, std::string* text);

  const std::string job_;
  bool has_events_ = false;
  std::map<std::string, int> processes_;  // by group
  std::vector<Lane> lanes_;
  int64_t began_at_ns_ = 0;
  uint64_t spans_ = 0;
  uint64_t lost_spans_ = 0;
  uint32_t steps_ = 0;
  bool done_ = false;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_CHROME_TRACE_H_
