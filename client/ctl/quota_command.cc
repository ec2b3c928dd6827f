// `optctl quota`: what a user or a group may use and uses, and which key of the
// configuration says so.

#include <iostream>
#include <memory>
#include <string>

#include "absl/strings/strip.h"
#include "client/ctl/command.h"
#include "client/ctl/quota_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// `whom`: a user, @GROUP, or "" for the caller.
absl::StatusOr<v1::ListUsersRequest> RequestOf(const std::string& whom) {
  v1::ListUsersRequest request;
  absl::string_view group = whom;
  if (whom.empty()) {
    request.set_own(true);
  } else if (!absl::ConsumePrefix(&group, "@")) {
    request.set_user(whom);
  } else if (!group.empty()) {
    request.set_group(std::string(group));
  } else {
    return absl::InvalidArgumentError(
        "\"@\" names no group: write @GROUP, with its name or number");
  }
  return request;
}

absl::Status Run(const Context& context, const std::string& whom) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ListUsersRequest request,
                            RequestOf(whom));
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ListUsersReply reply,
                            client->ListUsers(request));
  OPTSTATE_RETURN_IF_ERROR(CheckTellsKeys(reply));
  const absl::Status printed = PrintAnswered(context, reply, QuotaTable(reply));
  if (!context.machine_readable()) std::cerr << QuotaNotes(reply);
  return printed;
}

}  // namespace

void AddQuotaCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "quota",
      "What a user or a group may use and uses: jobs, ranks attached, bytes of "
      "state, of host budgets and on disks, the part of cores and disks by "
      "weight; and which key of the daemon's configuration says so, where it "
      "is changed. Who is no operator sees itself and the groups that it is "
      "in");
  auto whom = std::make_shared<std::string>();
  command->add_option("whom", *whom,
                      "A user or @GROUP, by name or number; default: yourself");
  command->callback([&context, whom] {
    context.run = [&context, whom] { return Run(context, *whom); };
  });
}

}  // namespace optstate::ctl
