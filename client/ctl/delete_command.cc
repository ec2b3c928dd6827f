#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

absl::Status Run(const Context& context, const std::string& name, bool force) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::DeleteJobReply reply,
                            client->DeleteJob(name, force));
  return PrintDone(context, reply, absl::StrCat("job ", name, " deleted\n"));
}

}  // namespace

void AddDeleteCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "delete", "Frees a job's state; it cannot be brought back");
  command->require_subcommand(1);
  CLI::App* job = command->add_subcommand("job", "A job and all its state");
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
