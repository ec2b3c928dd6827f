// optctl: inspects and controls optstated.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/command.h"
#include "client/ctl/exit_code.h"

namespace optstate::ctl {
namespace {

constexpr char kDescription[] =
    "optctl looks at an optstate daemon and steers it.\n\n"
    "  optctl status                    is the daemon there, what does it "
    "hold\n"
    "  optctl get jobs                  every job and its committed step\n"
    "  optctl get jobs -A --endpoint grpcs:a:7070 --endpoint grpcs:b:7070\n"
    "                                   the jobs of several nodes\n"
    "  optctl describe job gpt          why a job does not go on\n"
    "  optctl trace gpt > gpt.json      where the time of a step goes\n"
    "  optctl events --since 1h         what has happened\n"
    "  optctl quota                     what you may use, and use\n"
    "  optctl get params gpt -o json    for scripts\n";

constexpr char kFooter[] =
    "Endpoint: --endpoint, else $OPTSTATE_ENDPOINT, else the node's daemon.\n"
    "  unix:PATH | grpc:HOST:PORT | grpc:unix:PATH\n"
    "Exit codes: 0 done; 1 other error; 2 bad usage; 3 not found; 4 refused\n"
    "  (permission, wrong state); 5 no daemon there or no answer in time;\n"
    "  6 damaged on disk (verify, wake); 7 cancelled (Ctrl-C in verify, "
    "trace,\n"
    "  sleep, wake, delete and recover, or in a watch that waits for "
    "something);\n"
    "  8 the daemon is older than optctl, and does not know this (optctl "
    "upgrade).\n";

// Checks the timeout. CLI::Range would let nan pass, which is neither below nor
// above.
std::string CheckTimeout(const std::string& text) {
  double timeout_s = 0;
  if (absl::SimpleAtod(text, &timeout_s) && timeout_s >= 0.001 &&
      timeout_s <= 86400) {
    return "";
  }
  return absl::StrCat(text, " is not from 0.001 to 86400 seconds");
}

// Returns a message with the wrong word and the known verbs; empty when no verb
// is lacking. CLI11 only says that a verb is required.
std::string LackingVerb(const CLI::App& app) {
  const CLI::App* last = &app;
  std::string path = app.get_name();
  while (!last->get_subcommands().empty()) {
    last = last->get_subcommands().front();
    absl::StrAppend(&path, " ", last->get_name());
  }
  const auto verbs =
      last->get_subcommands([](const CLI::App* /*any*/) { return true; });
  if (verbs.empty()) return "";
  const std::vector<std::string> wrong = app.remaining(/*recurse=*/true);
  return absl::StrCat(
      wrong.empty() ? path + ": say what"
                    : absl::StrCat("\"", wrong.front(), "\" is nothing that ",
                                   path, " knows"),
      "; there are: ",
      absl::StrJoin(verbs, ", ", [](std::string* out, const CLI::App* verb) {
        absl::StrAppend(out, verb->get_name());
      }));
}

int Usage(const CLI::App& app, const CLI::ParseError& error) {
  const bool lacks = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  const std::string lacking = lacks ? LackingVerb(app) : "";
  if (!lacking.empty()) {
    std::cerr << "optctl: " << lacking << "\n";
  } else if (app.exit(error) == 0) {
    return kExitOk;
  }
  std::cerr << "optctl: bad usage; see optctl --help\n";
  return kExitUsage;
}

int Main(int argc, char** argv) {
  CLI::App app(kDescription, "optctl");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();  // global options may follow the verb, as with kubectl
  Context context;
  std::string output = "table";
  // One word for each: else the verb would be taken for a second endpoint.
  app.add_option("--endpoint", context.endpoints,
                 "Which daemon; for get jobs -A also several times")
      ->allow_extra_args(false);
  app.add_option("--endpoints-file", context.endpoints_file,
                 "File with an endpoint a line, for get jobs -A");
  app.add_option("--timeout", context.timeout_s, "Seconds to wait for it")
      ->check(CheckTimeout)
      ->capture_default_str();
  app.add_option("-o,--output", output, "table, wide, json or yaml")
      ->check(CLI::IsMember({"table", "wide", "json", "yaml"}))
      ->capture_default_str();
  AddStatusCommand(app, context);
  AddGetCommand(app, context);
  AddTopCommand(app, context);
  AddWatchCommand(app, context);
  AddEventsCommand(app, context);
  AddLogsCommand(app, context);
  AddDescribeCommand(app, context);
  AddQuotaCommand(app, context);
  AddDeleteCommand(app, context);
  AddRecoverCommand(app, context);
  AddSetCommand(app, context);
  AddVerifyCommand(app, context);
  AddTraceCommand(app, context);
  AddSleepCommand(app, context);
  AddWakeCommand(app, context);
  AddDrainCommand(app, context);
  AddUpgradeCommand(app, context);
  AddBugReportCommand(app, context);
  AddVersionCommand(app, context);
  AddCompletionCommand(app, context);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return Usage(app, error);
  }
  context.format = *ParseOutputFormat(output);
  const absl::Status status = context.run();
  if (!status.ok()) {
    std::cerr << "optctl: " << status.message() << "\n";
  }
  return ExitCode(status);
}

}  // namespace
}  // namespace optstate::ctl

int main(int argc, char** argv) {
  try {
    return optstate::ctl::Main(argc, argv);
  } catch (const std::exception& error) {
    // Only libraries throw here: out of memory, or an option that CLI11 would
    // not define.
    std::fprintf(stderr, "optctl: %s\n", error.what());
    return optstate::ctl::kExitOther;
  }
}
