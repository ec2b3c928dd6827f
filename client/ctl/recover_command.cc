#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

absl::Status Run(const Context& context, const std::string& name) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::RecoverJobReply reply,
                            client->RecoverJob(name));
  return PrintDone(
      context, reply,
      absl::StrCat("job ", name, ": its engine is being started again\n"));
}

}  // namespace

void AddRecoverCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "recover",
      "Starts the engine of a FAILED job again, also one that runs, once what "
      "made it fail is mended (describe job says what)");
  auto name = std::make_shared<std::string>();
  command->add_option("name", *name, "The job's name")->required();
  command->callback([&context, name] {
    context.run = [&context, name] { return Run(context, *name); };
  });
}

}  // namespace optstate::ctl
