#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

absl::Status Run(const Context& context, const std::string& name,
                 bool to_durable) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::RecoverJobReply reply,
                            client->RecoverJob(name, to_durable));
  if (to_durable && !reply.to_durable()) {
    return absl::UnimplementedError(
        "this daemon is older than optctl and knows no --to-durable: it has "
        "started the job's engine again with what is in memory");
  }
  return PrintDone(
      context, reply,
      absl::StrCat("job ", name, ": its engine is being started again",
                   to_durable ? " at the last durable step\n" : "\n"));
}

}  // namespace

void AddRecoverCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "recover",
      "Starts the engine of a FAILED job again, also one that runs, once what "
      "made it fail is mended (describe job says what)");
  auto name = std::make_shared<std::string>();
  command->add_option("name", *name, "The job's name")->required();
  auto to_durable = std::make_shared<bool>(false);
  command->add_flag("--to-durable", *to_durable,
                    "Give up what the job has in memory, and go on at its last "
                    "durable step, which is on disk");
  command->callback([&context, name, to_durable] {
    context.run = [&context, name, to_durable] {
      return Run(context, *name, *to_durable);
    };
  });
}

}  // namespace optstate::ctl
