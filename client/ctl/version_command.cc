#include <iostream>

#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "proto/shm/frame.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"

namespace optstate::ctl {
namespace {

absl::Status Run(const Context& context, bool client_only) {
  v1::ServerStatus client;
  client.set_version(std::string(kVersion));
  client.set_protocol_version(shm::kProtocolVersion);
  Table table({{""}, {"VERSION"}, {"PROTOCOL", /*right=*/true}});
  table.AddRow(
      {"optctl", std::string(kVersion), absl::StrCat(shm::kProtocolVersion)});
  if (client_only) return Print(context, client, table);
  OPTSTATE_ASSIGN_OR_RETURN(auto admin, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(v1::ServerStatus daemon, admin->GetStatus());
  table.AddRow(
      {"optstated", daemon.version(), absl::StrCat(daemon.protocol_version())});
  return Print(context, daemon, table);
}

}  // namespace

void AddVersionCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "version",
      "Versions of optctl and of the daemon (json and yaml: the "
      "daemon's status)");
  auto client_only = std::make_shared<bool>(false);
  command->add_flag("--client", *client_only, "optctl's alone; asks no daemon");
  command->callback([&context, client_only] {
    context.run = [&context, client_only] {
      return Run(context, *client_only);
    };
  });
}

}  // namespace optstate::ctl
