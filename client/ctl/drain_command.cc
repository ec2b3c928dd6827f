#include "client/ctl/command.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

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
  OPTSTATE_ASSIGN_OR_RETURN(const v1::DrainReply reply, client->Drain(resume));
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
