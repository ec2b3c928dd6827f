#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/journal.h"
#include "client/ctl/log_line.h"
#include "client/ctl/program_lines.h"
#include "client/ctl/since.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

struct LogsOptions {
  std::string job;
  std::string since;
  bool follow = false;
  bool raw = false;
};

absl::Status NoJournalctl() {
  return absl::FailedPreconditionError(
      "the log is in systemd's journal, and there is no journalctl in $PATH to "
      "read it with");
}

bool DoesNotAnswer(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

// Finds the unit of the daemon; of one that does not answer, which is when its
// log is needed most, the packages' unit.
absl::StatusOr<JournalUnit> FindUnit(const Context& context) {
  const auto client = context.Connect();
  if (client.ok() && !(*client)->is_local()) {
    return absl::FailedPreconditionError(absl::StrCat(
        (*client)->address(),
        ": the daemon is on another machine, and so is its log: "
        "run `optctl logs` there. `optctl events` works from here"));
  }
  absl::Status answered = client.status();
  if (client.ok()) {
    const absl::StatusOr<v1::ServerStatus> status = (*client)->GetStatus();
    if (status.ok()) return UnitOfDaemon(static_cast<pid_t>(status->pid()));
    answered = status.status();
  }
  if (!DoesNotAnswer(answered)) return answered;
  if (::access("/run/systemd/system", F_OK) != 0) return answered;
  std::cerr << "optctl: " << answered.message() << "\noptctl: so this is "
            << "the log of " << kPackagedUnit << ", the packages' unit"
            << std::endl;
  return JournalUnit{kPackagedUnit, false};
}

// Executes the command in place of this process; returns only on failure.
absl::Status Execute(std::vector<std::string> command) {
  std::vector<char*> argv;
  argv.reserve(command.size() + 1);
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  if (errno == ENOENT) return NoJournalctl();
  return OsError(errno, "execute journalctl");
}

// Shows what the command writes, lines of JSON as text, and ends this process
// as the command has ended; returns only on failure.
absl::Status ShowAsText(std::vector<std::string> command, bool follows) {
  const absl::StatusOr<int> code =
      PassLines(std::move(command), follows, TextOfLogLine);
  if (absl::IsNotFound(code.status())) return NoJournalctl();
  if (!code.ok() || *code == 0) return code.status();
  std::_Exit(*code);
}

absl::Status Run(const Context& context, const LogsOptions& options) {
  JournalQuery query;
  query.job = options.job;
  query.follow = options.follow;
  if (!options.since.empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(query.since, ParseSince(options.since));
  }
  // A mistake in the query is said before the daemon is looked for.
  OPTSTATE_RETURN_IF_ERROR(JournalCommand(query).status());
  OPTSTATE_ASSIGN_OR_RETURN(query.unit, FindUnit(context));
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<std::string> command,
                            JournalCommand(query));
  if (options.raw) return Execute(std::move(command));
  return ShowAsText(std::move(command), options.follow);
}

}  // namespace

void AddLogsCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "logs",
      "The log of a daemon that systemd runs on this machine, by journalctl: "
      "the daemon's lines and its engines'. Of another daemon it says where "
      "the log goes");
  auto options = std::make_shared<LogsOptions>();
  command->add_option("job,--job", options->job,
                      "Lines that name this job, and its engine's, alone");
  command->add_flag("-f,--follow", options->follow,
                    "Also shows lines from now on, until Ctrl-C");
  command->add_flag("--raw", options->raw,
                    "Lines as they are in the journal, also those of a daemon "
                    "with log_format: json");
  command
      ->add_option("--since", options->since,
                   "Only lines of this long ago or later: 90s, 10m, 2d")
      ->check(CLI::Validator(CheckSince, "TIME"));
  command->callback([&context, options] {
    context.run = [&context, options]() -> absl::Status {
      if (context.format != OutputFormat::kTable) {
        return absl::InvalidArgumentError(
            "logs are lines as journalctl prints them: for scripts there is "
            "`optctl events -o json`");
      }
      return Run(context, *options);
    };
  });
}

}  // namespace optstate::ctl
