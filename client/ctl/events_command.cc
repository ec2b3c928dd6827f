#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "client/ctl/command.h"
#include "client/ctl/daemon_absence.h"
#include "client/ctl/event_text.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/since.h"
#include "google/protobuf/util/time_util.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

constexpr absl::Duration kAskAgain = absl::Milliseconds(200);

struct EventsOptions {
  std::string job;
  std::string since;
  bool follow = false;
};

// Shows events in the order in which they come, those of before `since_ns`
// left out.
class Display {
 public:
  Display(const Context& context, bool in_lines, int64_t since_ns)
      : context_(context), in_lines_(in_lines), since_ns_(since_ns) {}

  // Returns whether more can be shown.
  bool Show(const v1::Event& event) {
    using google::protobuf::util::TimeUtil;
    if (TimeUtil::TimestampToNanoseconds(event.at()) < since_ns_) return true;
    if (in_lines_ || context_.machine_readable()) {
      told_.Update(PrintOne(context_, event, EventLine(event)));
    } else {
      table_.AddRow(EventCells(event));
    }
    return told_.ok();
  }

  // Returns why nothing can be shown any more, else OK.
  const absl::Status& told() const { return told_; }
  const Table& table() const { return table_; }

 private:
  const Context& context_;
  const bool in_lines_;
  const int64_t since_ns_;
  Table table_{EventColumns()};
  absl::Status told_;
};

absl::Status List(const Context& context, v1::WatchEventsRequest request,
                  const Interrupt& interrupt, Display* display) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  const absl::Status listed = client->WatchEvents(
      request, interrupt.fd(),
      [display](const v1::Event& event) { return display->Show(event); });
  OPTSTATE_RETURN_IF_ERROR(display->told());
  OPTSTATE_RETURN_IF_ERROR(listed);
  // Each message has been printed already.
  if (context.machine_readable()) return absl::OkStatus();
  return Print(context, v1::Event(), display->table());
}

// Asks until all that was asked for is there. Each call has a connection of its
// own, so that a daemon that was away is found again at once.
absl::Status AskOnce(const Context& context, const Interrupt& interrupt,
                     v1::WatchEventsRequest* request, Display* display) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  return client->WatchEvents(*request, interrupt.fd(),
                             [request, display](const v1::Event& event) {
                               request->set_after_sequence(event.sequence());
                               return display->Show(event);
                             });
}

absl::Status Follow(const Context& context, v1::WatchEventsRequest request,
                    const Interrupt& interrupt, Display* display) {
  DaemonAbsence absence(absl::Seconds(context.timeout_s));
  request.set_follow(true);
  while (true) {
    const absl::Status asked = AskOnce(context, interrupt, &request, display);
    OPTSTATE_RETURN_IF_ERROR(display->told());
    if (interrupt.Await(absl::ZeroDuration())) return absl::OkStatus();
    OPTSTATE_RETURN_IF_ERROR(absence.Judge(asked, absl::Now()));
    if (!asked.ok() && interrupt.Await(kAskAgain)) return absl::OkStatus();
  }
}

absl::Status Run(const Context& context, const EventsOptions& options) {
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  int64_t since_ns = 0;
  if (!options.since.empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(const absl::Duration since,
                              ParseSince(options.since));
    since_ns = absl::ToUnixNanos(absl::Now() - since);
  }
  v1::WatchEventsRequest request;
  request.set_job(options.job);
  Display display(context, options.follow, since_ns);
  return options.follow ? Follow(context, request, interrupt, &display)
                        : List(context, request, interrupt, &display);
}

}  // namespace

void AddEventsCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "events",
      "What has happened: jobs made, deleted and failed, engines that died and "
      "why, drains, upgrades, changes and by whom. The daemon remembers some "
      "thousands, over upgrades too, but not over its own crash; -o json gives "
      "an object a line");
  auto options = std::make_shared<EventsOptions>();
  command->add_option("job,--job", options->job, "Of this job alone");
  command->add_flag("-f,--follow", options->follow,
                    "Also shows what happens from now on, until Ctrl-C; waits "
                    "(--timeout) for a daemon that is away");
  command
      ->add_option("--since", options->since,
                   "Only what happened this long ago or later: 90s, 10m, 2d")
      ->check(CLI::Validator(CheckSince, "TIME"));
  command->callback([&context, options] {
    context.run = [&context, options] { return Run(context, *options); };
  });
}

}  // namespace optstate::ctl
