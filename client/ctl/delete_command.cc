#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/progress_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// A deletion that takes no longer says its end alone.
constexpr absl::Duration kQuietTime = absl::Seconds(1);

absl::Status Run(const Context& context, const std::string& name, bool force) {
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  ProgressLine line(context.machine_readable());
  const absl::Time began_at = absl::Now();
  absl::Time removes_since = began_at;
  const absl::Status deleted = client->DeleteJob(
      name, force, interrupt.fd(), [&](const v1::DeleteProgress& progress) {
        const absl::Time now = absl::Now();
        // A rate counts from the first byte: the wait for the engine is none of
        // it.
        if (progress.bytes() == 0) removes_since = now;
        if (progress.done() || now - began_at < kQuietTime) return;
        line.Show("", DeleteProgressText(name, progress, now - removes_since));
      });
  const absl::Status told = line.End("");
  OPTSTATE_RETURN_IF_ERROR(deleted);
  OPTSTATE_RETURN_IF_ERROR(told);
  return PrintDone(context, v1::DeleteJobReply(),
                   absl::StrCat("job ", name, " deleted\n"));
}

}  // namespace

void AddDeleteCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "delete", "Frees a job's state; it cannot be brought back");
  command->require_subcommand(1);
  CLI::App* job = command->add_subcommand(
      "job",
      "A job and all its state. Waits until its engine has ended and its files "
      "are removed, and shows how far that is. --timeout is for the daemon's "
      "sign of life, not for the whole; Ctrl-C ends optctl, and the daemon "
      "goes on");
  auto name = std::make_shared<std::string>();
  auto force = std::make_shared<bool>(false);
  job->add_option("name", *name, "The job's name")->required();
  job->add_flag("--force", *force,
                "Also when ranks are attached: their next step fails");
  job->callback([&context, name, force] {
    context.run = [&context, name, force] {
      return Run(context, *name, *force);
    };
  });
}

}  // namespace optstate::ctl
