#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/job_settings.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

absl::Status Run(const Context& context, const std::string& name,
                 const std::vector<std::string>& settings) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SetJobRequest request,
                            ParseJobSettings(name, settings));
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SetJobReply reply,
                            client->SetJob(request));
  return PrintDone(
      context, reply,
      absl::StrCat("job ", name, ": ", JobSettingsText(reply), "\n"));
}

}  // namespace

void AddSetCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "set", "Changes a job's settings while it trains, with the same results");
  command->require_subcommand(1);
  CLI::App* job = command->add_subcommand(
      "job",
      "host_budget=8GiB: memory for the records of a job on disk; "
      "durability=\"every 50\": how often a durable job is made durable; "
      "offload_fraction=0.3: the part of the elements that the CPU updates, "
      "the daemon's devices the others. In force between two steps, and for "
      "later engines too");
  auto name = std::make_shared<std::string>();
  auto settings = std::make_shared<std::vector<std::string>>();
  job->add_option("name", *name, "The job's name")->required();
  job->add_option("settings", *settings, "NAME=VALUE, one or more")->required();
  job->callback([&context, name, settings] {
    context.run = [&context, name, settings] {
      return Run(context, *name, *settings);
    };
  });
}

}  // namespace optstate::ctl
