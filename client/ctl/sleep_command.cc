#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/command.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/sleep_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

absl::Status Run(const Context& context, SleepVerb verb,
                 const std::string& name) {
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  ProgressLine line(context.machine_readable());
  const absl::Time began_at = absl::Now();
  v1::SleepProgress last;
  const auto show = [&](const v1::SleepProgress& progress) {
    last = progress;
    line.Show("", last.done() ? ""
                              : SleepProgressText(verb, name, last,
                                                  absl::Now() - began_at));
  };
  absl::Status done = verb == SleepVerb::kSleep
                          ? client->SleepJob(name, interrupt.fd(), show)
                          : client->WakeJob(name, interrupt.fd(), show);
  if (absl::IsUnimplemented(done)) {
    done = absl::UnimplementedError(
        "this daemon is older than optctl, and puts no job to sleep: `optctl "
        "upgrade` puts a newer one in its place");
  }
  absl::Status told = line.End(
      done.ok()
          ? absl::StrCat(
                SleepResultText(verb, name, last, absl::Now() - began_at), "\n")
          : "");
  OPTSTATE_RETURN_IF_ERROR(done);
  if (context.machine_readable()) told.Update(PrintDone(context, last, ""));
  return told;
}

void AddVerb(CLI::App& app, Context& context, SleepVerb verb,
             const std::string& word, const std::string& help) {
  CLI::App* command = app.add_subcommand(word, help);
  auto name = std::make_shared<std::string>();
  command->add_option("name", *name, "The job's name")->required();
  command->callback([&context, verb, name] {
    context.run = [&context, verb, name] { return Run(context, verb, *name); };
  });
}

}  // namespace

void AddSleepCommand(CLI::App& app, Context& context) {
  AddVerb(
      app, context, SleepVerb::kSleep, "sleep",
      "Copies a job without ranks to a disk (sleep_directory) and gives its "
      "memory back, until `optctl wake`; it stays asleep when the daemon or "
      "the machine starts again. --timeout is for the daemon's sign of "
      "life, not for the whole; Ctrl-C ends optctl, and the daemon goes on");
}

void AddWakeCommand(CLI::App& app, Context& context) {
  AddVerb(app, context, SleepVerb::kWake, "wake",
          "Copies a sleeping job back into memory, bit by bit as it was, and "
          "starts its engine. When there is too little memory, or a file is "
          "damaged (exit code 6), it stays asleep. --timeout and Ctrl-C are as "
          "of sleep");
}

}  // namespace optstate::ctl
