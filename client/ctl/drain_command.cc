#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

absl::Status Run(const Context& context, bool resume) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(
      const v1::DrainReply reply,
      client->Drain(absl::Seconds(context.timeout_s), resume));
  return PrintDone(context, reply,
                   resume ? "taking new steps and sessions again\n"
                          : "drained: no step is open, new ones are refused\n");
}

}  // namespace

void AddDrainCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "drain",
      "Finishes open steps (within --timeout) and refuses new ones, so that "
      "the node can be worked on; the state stays");
  auto resume = std::make_shared<bool>(false);
  command->add_flag("--resume", *resume, "Take new steps and sessions again");
  command->callback([&context, resume] {
    context.run = [&context, resume] { return Run(context, *resume); };
  });
}

}  // namespace optstate::ctl
