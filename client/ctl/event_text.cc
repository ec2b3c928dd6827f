#include "client/ctl/event_text.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/ctl/names.h"
#include "client/ctl/output.h"

namespace optstate::ctl {
namespace {

std::string SeverityOf(const v1::Event& event) {
  if (event.severity() == v1::EVENT_SEVERITY_UNSPECIFIED) return kUnknown;
  const std::string full = v1::EventSeverity_Name(event.severity());
  if (full.empty()) return absl::StrCat(static_cast<int>(event.severity()));
  return absl::AsciiStrToLower(absl::StripPrefix(full, "EVENT_SEVERITY_"));
}

std::string OrDash(const std::string& text) {
  return text.empty() ? "-" : text;
}

}  // namespace

std::vector<Column> EventColumns() {
  return {{"TIME"}, {"LEVEL"}, {"EVENT"}, {"JOB"}, {"BY"}, {"WHAT"}};
}

std::vector<std::string> EventCells(const v1::Event& event) {
  return {HumanTime(event.at()), SeverityOf(event),     event.kind(),
          OrDash(event.job()),   OrDash(event.actor()), event.text()};
}

std::string EventLine(const v1::Event& event) {
  std::string line = absl::StrFormat("%s %-7s %-14s", HumanTime(event.at()),
                                     SeverityOf(event), event.kind());
  if (!event.job().empty()) absl::StrAppend(&line, " job ", event.job(), ":");
  absl::StrAppend(&line, " ", event.text());
  if (!event.actor().empty()) absl::StrAppend(&line, " (", event.actor(), ")");
  return absl::StrCat(line, "\n");
}

}  // namespace optstate::ctl
