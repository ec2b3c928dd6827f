#include <chrono>
#include <future>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/progress_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

constexpr auto kShowInterval = std::chrono::seconds(1);

// Has the daemon drain, and says how long it may take. It is not asked
// meanwhile: a question to an engine that hangs would last longer than the
// timeout.
absl::StatusOr<v1::DrainReply> Drain(const Context& context,
                                     AdminClient* client) {
  const absl::Time deadline = absl::Now() + absl::Seconds(context.timeout_s);
  ProgressLine line(context.machine_readable());
  std::future<absl::StatusOr<v1::DrainReply>> asked = std::async(
      std::launch::async, [client] { return client->Drain(/*resume=*/false); });
  do {
    line.Show("", DrainProgressText(deadline - absl::Now()));
  } while (asked.wait_for(kShowInterval) != std::future_status::ready);
  absl::StatusOr<v1::DrainReply> reply = asked.get();
  const absl::Status told = line.End("");
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
