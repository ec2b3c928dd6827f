#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/job_settings.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Says what becomes of a change that takes longer than optctl waits.
absl::Status WithRest(const std::string& name, const absl::Status& status) {
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(),
                   ". If the engine has begun to write records anew, it goes "
                   "on, and training waits until it has done so; the same "
                   "command waits on (--timeout), and `optctl describe job ",
                   name, "` shows the weights in force"));
}

absl::Status Run(const Context& context, const std::string& name,
                 const std::vector<std::string>& settings) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SetJobRequest request,
                            ParseJobSettings(name, settings));
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  const absl::StatusOr<v1::SetJobReply> set = client->SetJob(request);
  const bool splits =
      !request.directory_weights().empty() || request.directory_weights_auto();
  if (splits && absl::IsDeadlineExceeded(set.status())) {
    return WithRest(name, set.status());
  }
  OPTSTATE_RETURN_IF_ERROR(set.status());
  const v1::SetJobReply& reply = *set;
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
      "the daemon's devices the others; "
      "directory_weights=3,1 or auto: which part of the records each of the "
      "daemon's directories gets, which are written anew while training waits "
      "(--timeout says how long optctl does). In "
      "force between two steps, and for later engines too");
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
