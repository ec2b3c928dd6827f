#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/command.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/verify_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Shows a verification: damages as they are found, and progress.
class Display {
 public:
  Display(std::string job, bool is_silent)
      : job_(std::move(job)), line_(is_silent), began_at_(absl::Now()) {}

  void Show(const v1::VerifyJobProgress& progress) {
    last_ = progress;
    damages_.MergeFrom(progress.damages());
    std::string damages;
    for (const v1::RecordDamage& damage : progress.damages()) {
      absl::StrAppend(&damages, DamageText(damage), "\n");
    }
    line_.Show(damages,
               last_.done() ? "" : VerifyProgressText(job_, last_, elapsed()));
  }
  // Ends the display with this text; returns whether all could be written.
  absl::Status End(const std::string& text) { return line_.End(text); }

  // Returns the last progress, with all damages.
  v1::VerifyJobProgress All() const {
    v1::VerifyJobProgress all = last_;
    *all.mutable_damages() = damages_;
    return all;
  }
  absl::Duration elapsed() const { return absl::Now() - began_at_; }

 private:
  const std::string job_;
  ProgressLine line_;
  const absl::Time began_at_;
  v1::VerifyJobProgress last_;
  google::protobuf::RepeatedPtrField<v1::RecordDamage> damages_;
};

absl::Status Run(const Context& context, const std::string& name) {
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  Display display(name, context.machine_readable());
  const absl::Status verified = client->VerifyJob(
      name, interrupt.fd(), [&display](const v1::VerifyJobProgress& progress) {
        display.Show(progress);
      });
  const v1::VerifyJobProgress all = display.All();
  absl::Status told = display.End(
      verified.ok() ? VerifyResultText(name, all, display.elapsed()) + "\n"
                    : "");
  // Damage found before an error counts too: `done` says that it is not all.
  if (context.machine_readable() && all.records_total() != 0) {
    told.Update(PrintDone(context, all, ""));
  }
  OPTSTATE_RETURN_IF_ERROR(verified);
  if (all.damaged() != 0) {
    return absl::DataLossError(
        absl::StrCat("job ", name, ": ", all.damaged(), " of ", all.records(),
                     " records are damaged on disk. Load the job anew from a "
                     "checkpoint, and "
                     "look after the disk"));
  }
  return told;
}

}  // namespace

void AddVerifyCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "verify",
      "Reads what a job has on disk and compares it with its checksums, while "
      "training goes on; exit code 6 when something is damaged. --timeout is "
      "for the daemon's sign of life, not for the whole; Ctrl-C ends it");
  auto name = std::make_shared<std::string>();
  command->add_option("name", *name, "The job's name")->required();
  command->callback([&context, name] {
    context.run = [&context, name] { return Run(context, *name); };
  });
}

}  // namespace optstate::ctl
