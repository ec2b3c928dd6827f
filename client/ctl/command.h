#ifndef OPTSTATE_CLIENT_CTL_COMMAND_H_
#define OPTSTATE_CLIENT_CTL_COMMAND_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/ctl/admin_client.h"
#include "client/ctl/output.h"
#include "client/ctl/table.h"

namespace optstate::ctl {

// The options that every command has, and the command that was chosen.
struct Context {
  std::vector<std::string> endpoints;  // empty: the node's daemon
  std::string endpoints_file;          // with further ones; empty: none
  double timeout_s = 10;
  OutputFormat format = OutputFormat::kTable;
  // The chosen subcommand, which sets this; called once all options are parsed.
  std::function<absl::Status()> run;

  // Makes a client of the one daemon that is named. INVALID_ARGUMENT: several
  // are.
  absl::StatusOr<std::unique_ptr<AdminClient>> Connect() const;
  bool machine_readable() const {
    return format == OutputFormat::kJson || format == OutputFormat::kYaml;
  }
};

// Writes `text` to stdout and flushes it. INTERNAL when stdout cannot be
// written, because neither the usage nor the daemon is at fault.
absl::Status Write(absl::string_view text);

// Prints `message` (json, yaml) or `table` (table, wide) to stdout.
absl::Status Print(const Context& context,
                   const google::protobuf::Message& message,
                   const Table& table);

// Prints the result of an action: `message` (json, yaml) or `text` for people.
absl::Status PrintDone(const Context& context,
                       const google::protobuf::Message& message,
                       absl::string_view text);

// Prints one of many results of a command that lasts: `message` (a line of
// JSON, or a document of YAML) or `text` for people.
absl::Status PrintOne(const Context& context,
                      const google::protobuf::Message& message,
                      absl::string_view text);

// Returns DEADLINE_EXCEEDED that names these jobs, if there are any.
absl::Status CheckAnswered(
    const google::protobuf::RepeatedPtrField<v1::UnansweredJob>& jobs);

// Prints a reply that can lack jobs, as far as it goes; then returns
// CheckAnswered.
template <typename Reply>
absl::Status PrintAnswered(const Context& context, const Reply& reply,
                           const Table& table) {
  absl::Status answered = CheckAnswered(reply.unanswered());
  // An empty table would falsely say that there is nothing.
  if (answered.ok() || context.machine_readable() || !table.empty()) {
    absl::Status printed = Print(context, reply, table);
    if (!printed.ok()) return printed;
  }
  return answered;
}

// Functions that each add one verb to `app`. `context` outlives the parse and
// the run.
void AddStatusCommand(CLI::App& app, Context& context);
void AddGetCommand(CLI::App& app, Context& context);
void AddTopCommand(CLI::App& app, Context& context);
void AddWatchCommand(CLI::App& app, Context& context);
void AddEventsCommand(CLI::App& app, Context& context);
void AddLogsCommand(CLI::App& app, Context& context);
void AddDescribeCommand(CLI::App& app, Context& context);
// Prints the jobs of every daemon that is named. The error of a daemon that
// gives no answer is printed in a line of its own, and returned last.
absl::Status GetJobsOfAllNodes(const Context& context);
// Adds `users` and `quotas` to `get`.
void AddGetUsers(CLI::App& get, Context& context);
// Each adds a thing to `describe`.
void AddDescribeTier(CLI::App& describe, Context& context);
void AddDescribeDevice(CLI::App& describe, Context& context);
void AddQuotaCommand(CLI::App& app, Context& context);
void AddDeleteCommand(CLI::App& app, Context& context);
void AddRecoverCommand(CLI::App& app, Context& context);
void AddSetCommand(CLI::App& app, Context& context);
void AddSleepCommand(CLI::App& app, Context& context);
void AddWakeCommand(CLI::App& app, Context& context);
void AddDrainCommand(CLI::App& app, Context& context);
void AddUpgradeCommand(CLI::App& app, Context& context);
void AddVerifyCommand(CLI::App& app, Context& context);
void AddTraceCommand(CLI::App& app, Context& context);
void AddBugReportCommand(CLI::App& app, Context& context);
void AddVersionCommand(CLI::App& app, Context& context);
void AddCompletionCommand(CLI::App& app, Context& context);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_COMMAND_H_
