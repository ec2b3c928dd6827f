#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/progress_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(20);

// Returns the upgrade's result, once every engine is replaced or is known to
// stay; shows how far it is until then.
absl::StatusOr<v1::ServerStatus> AwaitEnd(AdminClient& client,
                                          const std::string& id,
                                          absl::Time deadline,
                                          ProgressLine* line) {
  const absl::Time began_at = absl::Now();
  absl::Status last = absl::OkStatus();
  bool unknown = false;
  do {
    absl::StatusOr<v1::ServerStatus> status = client.GetStatus();
    // No daemon answers between the two builds.
    last = status.status();
    unknown = status.ok() && status->upgrade().id() != id;
    if (status.ok() && status->upgrade().id() == id &&
        status->upgrade().done()) {
      return status;
    }
    if (status.ok() && !unknown) {
      line->Show("", UpgradeProgressText(*status, absl::Now() - began_at));
    }
    absl::SleepFor(kLook);
  } while (absl::Now() < deadline);
  // This is neither a refusal nor a missing daemon.
  if (unknown) {
    return absl::AbortedError(
        "the upgrade has begun, and the daemon that answers knows nothing of "
        "it: it died and was started anew, its log says why; `optctl status` "
        "says which build it is");
  }
  return absl::DeadlineExceededError(
      last.ok()
          ? "the upgrade has begun and is not done yet; `optctl status -o "
            "json` says how it goes on"
          : absl::StrCat("the upgrade has begun, and the daemon does not "
                         "answer now (",
                         last.message(),
                         "); if it does not come back, its log says why"));
}

// Makes the path absolute, because the daemon has another working directory.
absl::StatusOr<std::string> Absolute(const std::string& binary) {
  if (binary.empty()) return binary;
  std::error_code error;
  const auto path = std::filesystem::absolute(binary, error);
  if (error) return absl::InvalidArgumentError(error.message());
  return path.string();
}

absl::Status Run(const Context& context, const std::string& binary) {
  const absl::Time deadline = absl::Now() + absl::Seconds(context.timeout_s);
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const std::string path, Absolute(binary));
  OPTSTATE_ASSIGN_OR_RETURN(const v1::UpgradeReply reply,
                            client->Upgrade(path));
  // A failure to write is reported at the end: the upgrade goes on.
  absl::Status told;
  if (!context.machine_readable()) {
    told = Write(absl::StrCat("upgrading to ", reply.version(), "\n"));
  }
  ProgressLine line(context.machine_readable());
  const absl::StatusOr<v1::ServerStatus> ended =
      AwaitEnd(*client, reply.id(), deadline, &line);
  told.Update(line.End(""));
  OPTSTATE_RETURN_IF_ERROR(ended.status());
  const v1::ServerStatus& status = *ended;
  const v1::UpgradeProgress& upgrade = status.upgrade();
  if (!upgrade.problems().empty()) {
    return absl::AbortedError(
        absl::StrCat("not all of it was upgraded: ",
                     absl::StrJoin(upgrade.problems(), "; ")));
  }
  Table table({{"UPGRADED"}, {""}});
  table.AddRow({"version", status.version()});
  table.AddRow({"pid", absl::StrCat(status.pid())});
  table.AddRow({"engines replaced", absl::StrCat(upgrade.engines_replaced())});
  told.Update(Print(context, status, table));
  return told;
}

}  // namespace

void AddUpgradeCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "upgrade",
      "Takes another build of optstated into use, the daemon first, then the "
      "engine of one job after another; jobs go on. Waits for the end "
      "(--timeout)");
  auto binary = std::make_shared<std::string>();
  command
      ->add_option("--binary", *binary,
                   "The optstated to take; default: what is installed where "
                   "the running one was started from")
      ->type_name("PATH")
      // An empty path in the request means the default.
      ->check([](const std::string& path) {
        return path.empty() ? "no path is given" : "";
      });
  command->callback([&context, binary] {
    context.run = [&context, binary] { return Run(context, *binary); };
  });
}

}  // namespace optstate::ctl
