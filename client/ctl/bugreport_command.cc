#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/ctl/bug_report.h"
#include "client/ctl/command.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/journal.h"
#include "client/ctl/metrics_page.h"
#include "client/ctl/program_output.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/progress_text.h"
#include "client/ctl/tar_gz_writer.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

constexpr char kStdout[] = "-";
// Engines whose processes are looked at; `jobs.json` has all.
constexpr int kEnginesMax = 64;
constexpr int kLogLinesMax = 5000;

template <typename Reply>
absl::StatusOr<std::string> AsJson(const absl::StatusOr<Reply>& reply) {
  if (!reply.ok()) return reply.status();
  return RenderMessage(*reply, OutputFormat::kJson);
}

absl::StatusOr<std::string> ReadEvents(AdminClient& client, int interrupt) {
  std::string lines;
  absl::Status rendered;
  const absl::Status read = client.WatchEvents(
      v1::WatchEventsRequest(), interrupt, [&](const v1::Event& event) {
        const auto line = RenderOne(event, OutputFormat::kJson);
        rendered.Update(line.status());
        if (line.ok()) lines += *line;
        return rendered.ok();
      });
  OPTSTATE_RETURN_IF_ERROR(rendered);
  OPTSTATE_RETURN_IF_ERROR(read);
  return lines;
}

// A daemon, as far as it can be found and answers.
struct Daemon {
  std::unique_ptr<AdminClient> client;
  absl::StatusOr<v1::ServerStatus> status = absl::UnknownError("");
  bool is_local = true;
};

// The parts that are fetched, one after the other; one may be several files.
constexpr absl::string_view kParts[] = {
    "status.json",  "jobs.json",   "sessions.json", "tiers.json",
    "devices.json", "users.json",  "events.jsonl",  "machine",
    "daemon",       "metrics.txt", "engines",       "log.txt"};

// Says on stderr which part is being fetched, for stdout may get the archive.
// Each one may last for a timeout.
class ReportProgress {
 public:
  // `report` outlives the object.
  explicit ReportProgress(const BugReport* report)
      : report_(report),
        line_(/*is_silent=*/false, STDERR_FILENO),
        began_at_(absl::Now()) {}
  ~ReportProgress() { line_.End("").IgnoreError(); }
  ReportProgress(const ReportProgress&) = delete;
  ReportProgress& operator=(const ReportProgress&) = delete;

  // `part`: one of kParts.
  void Begin(absl::string_view part) {
    const auto number = static_cast<uint64_t>(
        std::find(std::begin(kParts), std::end(kParts), part) -
        std::begin(kParts) + 1);
    line_.Show(
        "", BugReportProgressText(part, number, std::size(kParts),
                                  report_->bytes(), absl::Now() - began_at_));
  }

 private:
  const BugReport* const report_;
  ProgressLine line_;
  const absl::Time began_at_;
};

absl::StatusOr<Daemon> FindDaemon(const Context& context) {
  Daemon daemon;
  absl::StatusOr<std::unique_ptr<AdminClient>> client = context.Connect();
  if (client.ok()) {
    daemon.client = *std::move(client);
    daemon.is_local = daemon.client->is_local();
  } else if (absl::IsUnavailable(client.status())) {
    daemon.status = client.status();
  } else {
    return client.status();  // no such endpoint can be
  }
  return daemon;
}

// Adds what the daemon says; returns the pids of engines, of no more jobs than
// that.
std::vector<pid_t> AddAnswers(const Daemon& daemon, const Interrupt& interrupt,
                              ReportProgress* progress, BugReport* report) {
  report->Add("status.json", AsJson(daemon.status));
  std::vector<pid_t> engines;
  // Each further question would last for one more timeout.
  if (!daemon.status.ok()) {
    for (const char* name : {"jobs.json", "sessions.json", "tiers.json",
                             "devices.json", "users.json", "events.jsonl"}) {
      report->Add(name, absl::UnavailableError("see status.json"));
    }
    return engines;
  }
  AdminClient& client = *daemon.client;
  progress->Begin("jobs.json");
  const absl::StatusOr<v1::ListJobsReply> jobs = client.ListJobs();
  report->Add("jobs.json", AsJson(jobs));
  progress->Begin("sessions.json");
  report->Add("sessions.json", AsJson(client.ListSessions("")));
  progress->Begin("tiers.json");
  report->Add("tiers.json", AsJson(client.DescribeTiers({})));
  progress->Begin("devices.json");
  report->Add("devices.json", AsJson(client.DescribeDevices()));
  progress->Begin("users.json");
  report->Add("users.json", AsJson(client.ListUsers(v1::ListUsersRequest())));
  progress->Begin("events.jsonl");
  report->Add("events.jsonl", ReadEvents(client, interrupt.fd()));
  if (!jobs.ok()) return engines;
  for (const v1::Job& job : jobs->jobs()) {
    if (job.engine_pid() == 0 || engines.size() == kEnginesMax) continue;
    engines.push_back(static_cast<pid_t>(job.engine_pid()));
  }
  return engines;
}

absl::StatusOr<std::string> ReadLog(const Daemon& daemon,
                                    absl::Duration timeout) {
  JournalQuery query;
  query.lines_max = kLogLinesMax;
  query.unit = {kPackagedUnit, false};
  if (daemon.status.ok()) {
    OPTSTATE_ASSIGN_OR_RETURN(
        query.unit, UnitOfDaemon(static_cast<pid_t>(daemon.status->pid())));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::string> command,
                            JournalCommand(query));
  return OutputOf(command, BugReport::kFileBytesMax, timeout);
}

// Reads the daemon's own counters, which no answer of Admin has.
absl::StatusOr<std::string> ReadMetricsOf(pid_t daemon,
                                          absl::Duration timeout) {
  const std::string address = MetricsAddressOf(daemon);
  if (!address.empty()) {
    return ReadMetrics(address, BugReport::kFileBytesMax, timeout);
  }
  return absl::NotFoundError(
      "the daemon serves none (--metrics, metrics.address), or this user may "
      "not see where");
}

void Collect(const Context& context, const Interrupt& interrupt, Daemon* found,
             BugReport* report) {
  ReportProgress progress(report);
  progress.Begin("status.json");
  if (found->client != nullptr) found->status = found->client->GetStatus();
  const Daemon& daemon = *found;
  const std::vector<pid_t> engines =
      AddAnswers(daemon, interrupt, &progress, report);
  if (!daemon.is_local) {
    const absl::Status elsewhere = absl::FailedPreconditionError(absl::StrCat(
        "the daemon is on another machine (", daemon.client->address(),
        "): run `optctl bugreport` there too"));
    for (const char* name : {"machine", "daemon", "log.txt"}) {
      report->Add(name, elsewhere);
    }
    return;
  }
  progress.Begin("machine");
  AddMachine(report);
  if (daemon.status.ok()) {
    const auto pid = static_cast<pid_t>(daemon.status->pid());
    progress.Begin("daemon");
    AddDaemonProcess(pid, report);
    progress.Begin("metrics.txt");
    report->Add("metrics.txt",
                ReadMetricsOf(pid, absl::Seconds(context.timeout_s)));
  } else {
    report->Add("daemon", absl::UnavailableError("see status.json"));
  }
  progress.Begin("engines");
  for (const pid_t engine : engines) AddEngineProcess(engine, report);
  progress.Begin("log.txt");
  report->Add("log.txt", ReadLog(daemon, absl::Seconds(context.timeout_s)));
}

std::string DefaultFile() {
  char host[65] = {};
  if (::gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  return absl::StrCat(
      "optstate-bugreport-", host, "-",
      absl::FormatTime("%Y%m%dT%H%M%SZ", absl::Now(), absl::UTCTimeZone()),
      ".tar.gz");
}

// Opens the archive for writing; one that is there is never written over.
absl::StatusOr<UniqueFd> Open(const std::string& file) {
  if (file == kStdout) {
    if (::isatty(STDOUT_FILENO) != 0) {
      return absl::InvalidArgumentError(
          "--file -: the archive would go to a terminal; redirect it");
    }
    UniqueFd out(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0));
    if (!out.ok()) return OsError(errno, "stdout");
    return out;
  }
  UniqueFd out(::open(file.c_str(),
                      O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                      0600));
  if (out.ok()) return out;
  if (errno == EEXIST) {
    return absl::AlreadyExistsError(
        absl::StrCat(file, " is there already, and is not written over"));
  }
  return OsError(errno, absl::StrCat("create ", file));
}

absl::StatusOr<std::string> WriteReport(const Context& context, Daemon* daemon,
                                        UniqueFd fd) {
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  OPTSTATE_ASSIGN_OR_RETURN(const auto archive,
                            TarGzWriter::Make(std::move(fd), absl::Now()));
  BugReport report(archive.get());
  Collect(context, interrupt, daemon, &report);
  if (interrupt.Await(absl::ZeroDuration())) {
    return absl::CancelledError("interrupted: there is no bug report");
  }
  return report.Finish();
}

absl::Status Run(const Context& context, std::string file) {
  if (file.empty()) file = DefaultFile();
  OPTSTATE_ASSIGN_OR_RETURN(Daemon daemon, FindDaemon(context));
  OPTSTATE_ASSIGN_OR_RETURN(UniqueFd fd, Open(file));
  const absl::StatusOr<std::string> list =
      WriteReport(context, &daemon, std::move(fd));
  if (!list.ok() && file != kStdout) (void)::unlink(file.c_str());
  OPTSTATE_RETURN_IF_ERROR(list.status());
  if (file == kStdout) {
    std::cerr << *list;
    return absl::OkStatus();
  }
  return Write(absl::StrCat(*list, file,
                            ": look through it before you pass "
                            "it on\n"));
}

}  // namespace

void AddBugReportCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "bugreport",
      "Writes one archive for those who look for a fault: status, jobs, "
      "sessions, disks, devices, events, metrics, configuration, limits, "
      "mounts, versions and the last lines of the log; no tensors and no "
      "environment "
      "variables. Lists what is inside and what could not be had");
  auto file = std::make_shared<std::string>();
  command
      ->add_option("--file", *file,
                   "Where to; never written over. -: stdout. Default: "
                   "optstate-bugreport-HOST-TIME.tar.gz in this folder")
      ->type_name("FILE.tar.gz");
  command->callback([&context, file] {
    context.run = [&context, file]() -> absl::Status {
      if (context.format != OutputFormat::kTable) {
        return absl::InvalidArgumentError(
            "bugreport writes an archive, which --file names; -o is for "
            "tables");
      }
      return Run(context, *file);
    };
  });
}

}  // namespace optstate::ctl
