#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/command.h"
#include "client/ctl/lock_text.h"
#include "client/ctl/names.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

std::string Sessions(const v1::ServerStatus& status) {
  if (status.unanswered().empty()) return absl::StrCat(status.session_count());
  return absl::StrCat(kUnknown, " (", status.session_count(), " without ",
                      status.unanswered_size(), " jobs that gave no answer)");
}

absl::Status Run(const Context& context) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(v1::ServerStatus status, client->GetStatus());
  Table table({{"DAEMON"}, {""}});
  table.AddRow({"version", absl::StrCat(status.version(), " (protocol ",
                                        status.protocol_version(), ")")});
  table.AddRow({"host", status.host()});
  table.AddRow({"pid", absl::StrCat(status.pid())});
  table.AddRow({"started", HumanTime(status.started_at())});
  table.AddRow({"draining", status.draining() ? "yes" : "no"});
  table.AddRow({"socket", status.socket()});
  table.AddRow({"listen", status.listen().empty()
                              ? "-"
                              : absl::StrJoin(status.listen(), " ")});
  table.AddRow({"jobs", absl::StrCat(status.job_count())});
  table.AddRow({"sessions", Sessions(status)});
  table.AddRow(
      {"state", absl::StrCat(HumanBytes(status.state_bytes()), " used, ",
                             status.has_state_bytes_available()
                                 ? HumanBytes(status.state_bytes_available())
                                 : kUnknown,
                             " left in ", status.state_dir(),
                             status.state_bytes_problem().empty() ? "" : ": ",
                             status.state_bytes_problem())});
  table.AddRow({"pages", status.huge_pages()});
  if (status.has_memory_lock()) {
    table.AddRow({"locked", LockText(status.memory_lock())});
  }
  table.AddRow({"workers", absl::StrCat(status.workers(), " an engine, ",
                                        status.instruction_set())});
  return PrintAnswered(context, status, table);
}

}  // namespace

void AddStatusCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "status", "The daemon: version, sockets, memory, what its pages are");
  command->callback(
      [&context] { context.run = [&context] { return Run(context); }; });
}

}  // namespace optstate::ctl
