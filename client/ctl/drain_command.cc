#include <future>
#include <string>

#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/progress_text.h"
#include "client/ctl/show_while.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

constexpr absl::Duration kShowInterval = absl::Seconds(1);

std::string LookAtSteps(AdminClient* client, absl::Duration left) {
  if (client == nullptr) return DrainProgressText(nullptr, left);
  const absl::StatusOr<v1::ListJobsReply> jobs = client->ListJobs();
  return DrainProgressText(jobs.ok() ? &*jobs : nullptr, left);
}

// Has the daemon drain, and says which steps it waits for, and how long that
// may take.
absl::StatusOr<v1::DrainReply> Drain(const Context& context,
                                     AdminClient* client) {
  std::future<absl::StatusOr<v1::DrainReply>> asked = std::async(
      std::launch::async, [client] { return client->Drain(/*resume=*/false); });
  const absl::Status told = ShowWhile(
      context, {.interval = kShowInterval},
      [&asked](absl::Duration time) {
        return asked.wait_for(absl::ToChronoNanoseconds(time)) ==
               std::future_status::ready;
      },
      LookAtSteps);
  absl::StatusOr<v1::DrainReply> reply = asked.get();
  if (reply.ok() && !told.ok()) return told;
  return reply;
}

const char* TextOf(const v1::DrainReply& reply, bool resume) {
  if (!resume) {
    return "drained: no step is open, new steps and sessions are refused until "
           "`optctl drain --resume`\n";
  }
  return reply.was_draining()
             ? "draining has ended: new steps and sessions are taken again\n"
             : "it was not draining: new steps and sessions are taken as "
               "before\n";
}

absl::Status Run(const Context& context, bool resume) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(
      const v1::DrainReply reply,
      resume ? client->Drain(resume) : Drain(context, client.get()));
  return PrintDone(context, reply, TextOf(reply, resume));
}

}  // namespace

void AddDrainCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "drain",
      "Refuses new steps and sessions and waits (--timeout) until open steps "
      "are finished, so that the node can be worked on; the state stays. It "
      "stays in force, also when the wait was too short, until --resume");
  auto resume = std::make_shared<bool>(false);
  command->add_flag("--resume", *resume, "Take new steps and sessions again");
  command->callback([&context, resume] {
    context.run = [&context, resume] { return Run(context, *resume); };
  });
}

}  // namespace optstate::ctl
