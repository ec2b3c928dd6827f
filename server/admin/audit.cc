#include "server/admin/audit.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "optstate/v1/admin.pb.h"
#include "server/observe/event_log.h"
#include "server/observe/peer_log.h"

namespace optstate::admin {
namespace {

// Limit of a peer's text in a line.
constexpr size_t kTextBytesMax = 256;
// The changes of one actor that have a line each.
constexpr double kMadeBurst = 1000;
constexpr double kMadePerSecond = 10;

std::string Quoted(absl::string_view text) {
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kTextBytesMax)),
                      "\"");
}

bool IsRefusal(const absl::Status& status) {
  return absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status);
}

std::string VerdictOf(const absl::Status& status) {
  if (status.ok()) return "verdict=done";
  return absl::StrCat("verdict=", IsRefusal(status) ? "refused" : "failed",
                      " code=", absl::StatusCodeToString(status.code()),
                      " reason=", Quoted(status.message()));
}

// A change that was made has an event of its own kind, e.g. "job_deleted",
// which names the actor too.
bool HasEventOfItsOwn(absl::string_view method) {
  static constexpr absl::string_view kMethods[] = {
      "DeleteJob", "RecoverJob", "SetJob", "Upgrade", "Drain"};
  return std::find(std::begin(kMethods), std::end(kMethods), method) !=
         std::end(kMethods);
}

// A stranger can be refused at will, and would take the budget of others' lines
// with it. Whoever makes a change is known.
observe::LineLimiter& MadeChanges() {
  static observe::LineLimiter& limiter = *new observe::LineLimiter(
      {.burst = kMadeBurst, .lines_per_s = kMadePerSecond});
  return limiter;
}

}  // namespace

void Audit(const Change& change, const absl::Status& status) {
  const observe::LineLimiter::Verdict verdict =
      status.ok() ? MadeChanges().Judge("change", change.actor)
                  : observe::PeerLines().Judge(
                        IsRefusal(status) ? "refused change" : "failed change",
                        change.actor);
  for (const std::string& text : verdict.left_out) spdlog::warn("{}", text);
  if (!verdict.write) return;
  std::string text = absl::StrCat("method=", change.method);
  if (!change.job.empty()) absl::StrAppend(&text, " job=", Quoted(change.job));
  if (!change.detail.empty()) absl::StrAppend(&text, " ", change.detail);
  absl::StrAppend(&text, " ", VerdictOf(status));
  spdlog::log(IsRefusal(status) ? spdlog::level::warn : spdlog::level::info,
              "audit: actor={} {}", Quoted(change.actor), text);
  if (status.ok() && HasEventOfItsOwn(change.method)) return;
  v1::Event event;
  event.set_kind("audit");
  event.set_severity(status.ok() ? v1::EVENT_SEVERITY_INFO
                                 : v1::EVENT_SEVERITY_WARNING);
  event.set_job(change.job);
  event.set_actor(change.actor);
  event.set_text(text);
  observe::Events().Add(std::move(event));
}

}  // namespace optstate::admin
