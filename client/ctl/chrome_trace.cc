#include "client/ctl/chrome_trace.h"

#include <array>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Groups in the order in which a step goes through them; others come last.
constexpr std::array<absl::string_view, 5> kGroups = {
    "steps", "ranks", "workers", "device", "disks"};

int OrderOf(absl::string_view group) {
  for (size_t i = 0; i < kGroups.size(); ++i) {
    if (absl::StartsWith(group, kGroups[i])) return static_cast<int>(i);
  }
  return static_cast<int>(kGroups.size());
}

// The format's times are in microseconds; a float would round them.
std::string Micros(int64_t ns) {
  constexpr int64_t kNsPerMicro = 1000;
  return absl::StrFormat("%d.%03d", ns / kNsPerMicro, ns % kNsPerMicro);
}

// Returns an event that says something of a process or a thread.
std::string Metadata(absl::string_view what, int process, size_t thread,
                     absl::string_view arguments) {
  return absl::StrCat("{\"ph\":\"M\",\"name\":\"", what, "\",\"pid\":", process,
                      ",\"tid\":", thread, ",\"args\":{", arguments, "}}");
}

}  // namespace

std::string JsonString(absl::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        json += "\\\"";
        break;
      case '\\':
        json += "\\\\";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          absl::StrAppendFormat(&json, "\\u%04x", static_cast<unsigned>(c));
        } else {
          json += c;
        }
    }
  }
  json += '"';
  return json;
}

std::string ChromeTrace::Begin() {
  return "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
}

void ChromeTrace::AddEvent(absl::string_view event, std::string* text) {
  absl::StrAppend(text, has_events_ ? ",\n" : "\n", event);
  has_events_ = true;
}

void ChromeTrace::AddLane(const v1::TraceLane& lane, std::string* text) {
  const auto next = static_cast<int>(processes_.size()) + 1;
  const auto [found, is_new] = processes_.emplace(lane.group(), next);
  const int process = found->second;
  if (is_new) {
    AddEvent(Metadata("process_name", process, 0,
                      absl::StrCat("\"name\":", JsonString(lane.group()))),
             text);
    AddEvent(Metadata("process_sort_index", process, 0,
                      absl::StrCat("\"sort_index\":", OrderOf(lane.group()))),
             text);
  }
  lanes_.push_back({lane.group(), process});
  AddEvent(Metadata("thread_name", process, lanes_.size(),
                    absl::StrCat("\"name\":", JsonString(lane.name()))),
           text);
}

absl::Status ChromeTrace::AddSpan(const v1::TraceSpan& span,
                                  std::string* text) {
  if (span.lane() >= lanes_.size() || span.begin_ns() < 0 ||
      span.duration_ns() < 0) {
    return absl::InternalError(
        absl::StrCat("the daemon has sent a span of lane ", span.lane(), " of ",
                     lanes_.size(), ", from ", span.begin_ns(), " ns for ",
                     span.duration_ns(), " ns"));
  }
  const Lane& lane = lanes_[span.lane()];
  std::string arguments;
  if (span.step() != 0) absl::StrAppend(&arguments, "\"step\":", span.step());
  if (span.bytes() != 0) {
    absl::StrAppend(&arguments, arguments.empty() ? "" : ",",
                    "\"bytes\":", span.bytes());
  }
  AddEvent(absl::StrCat("{\"ph\":\"X\",\"name\":", JsonString(span.name()),
                        ",\"cat\":", JsonString(lane.group),
                        ",\"pid\":", lane.process, ",\"tid\":", span.lane() + 1,
                        ",\"ts\":", Micros(span.begin_ns()),
                        ",\"dur\":", Micros(span.duration_ns()), ",\"args\":{",
                        arguments, "}}"),
           text);
  ++spans_;
  return absl::OkStatus();
}

absl::StatusOr<std::string> ChromeTrace::Add(const v1::TraceChunk& chunk) {
  if (chunk.began_at_ns() != 0) began_at_ns_ = chunk.began_at_ns();
  lost_spans_ += chunk.lost_spans();
  steps_ = chunk.steps();
  done_ = chunk.done();
  std::string text;
  for (const v1::TraceLane& lane : chunk.lanes()) AddLane(lane, &text);
  for (const v1::TraceSpan& span : chunk.spans()) {
    OPTSTATE_RETURN_IF_ERROR(AddSpan(span, &text));
  }
  return text;
}

// Numbers that a reader of JSON would round are strings.
std::string ChromeTrace::End() const {
  return absl::StrCat("\n],\"otherData\":{\"job\":", JsonString(job_),
                      ",\"began_at_ns\":\"", began_at_ns_,
                      "\",\"steps\":", steps_, ",\"lost_spans\":", lost_spans_,
                      ",\"complete\":", done_ ? "true" : "false", "}}\n");
}

}  // namespace optstate::ctl
