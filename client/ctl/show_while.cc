#include "client/ctl/show_while.h"

#include <algorithm>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "client/ctl/progress_line.h"

namespace optstate::ctl {
namespace {

// The most that one question takes: an engine may hang.
constexpr double kQuestionMaxS = 1;

}  // namespace

absl::Status ShowWhile(
    const Context& context, const ShowTimes& times,
    absl::FunctionRef<bool(absl::Duration)> is_over,
    absl::FunctionRef<std::string(AdminClient*, absl::Duration)> look) {
  const absl::Time began_at = absl::Now();
  const absl::Time deadline = began_at + absl::Seconds(context.timeout_s);
  Context looking = context;
  looking.timeout_s = std::min(kQuestionMaxS, context.timeout_s / 4);
  const absl::Duration question = absl::Seconds(looking.timeout_s);
  const absl::StatusOr<std::unique_ptr<AdminClient>> client = looking.Connect();
  ProgressLine line(context.machine_readable());
  do {
    const absl::Duration left = deadline - absl::Now();
    const bool may_ask = client.ok() && left > question;
    const std::string text = look(may_ask ? client->get() : nullptr, left);
    if (absl::Now() - began_at >= times.quiet) line.Show("", text);
  } while (!is_over(times.interval));
  return line.End("");
}

}  // namespace optstate::ctl
