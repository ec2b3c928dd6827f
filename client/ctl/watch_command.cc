#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/command.h"
#include "client/ctl/daemon_absence.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/job_watch.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

struct WatchOptions {
  std::string job;  // empty: all
  double interval_s = 1;
  double step_interval_s = 10;
  std::string until;  // empty: Ctrl-C
};

// Tells what changes of one job or of all.
class Watch {
 public:
  Watch(const Context& context, const WatchOptions& options)
      : context_(context), options_(options) {}

  // Looks once and prints what has changed. Returns the look at the one job
  // that is watched.
  absl::StatusOr<JobLook> LookOnce() {
    OPTSTATE_ASSIGN_OR_RETURN(auto client, context_.Connect());
    if (options_.job.empty()) return LookAtAll(*client);
    absl::StatusOr<v1::Job> job =
        client->GetJob(options_.job, /*memory=*/false);
    if (!job.ok() && !absl::IsNotFound(job.status())) return job.status();
    JobLook look;
    if (job.ok()) look = *std::move(job);
    OPTSTATE_RETURN_IF_ERROR(Tell(options_.job, look));
    return look;
  }

 private:
  absl::StatusOr<JobLook> LookAtAll(AdminClient& client) {
    OPTSTATE_ASSIGN_OR_RETURN(v1::ListJobsReply reply, client.ListJobs());
    std::map<std::string, JobLook> looks;
    for (const auto& [name, watch] : watches_) looks[name] = std::nullopt;
    for (v1::Job& job : *reply.mutable_jobs()) looks[job.name()] = job;
    for (const auto& [name, look] : looks) {
      OPTSTATE_RETURN_IF_ERROR(Tell(name, look));
      // A job of that name that comes later is another one.
      if (!look.has_value()) watches_.erase(name);
    }
    return JobLook();
  }

  absl::Status Tell(const std::string& name, const JobLook& look) {
    const absl::Time now = absl::Now();
    const absl::Duration steps = absl::Seconds(options_.step_interval_s);
    JobWatch& watch = watches_.try_emplace(name, steps).first->second;
    std::string lines;
    for (const std::string& text : watch.Look(look, now)) {
      absl::StrAppend(
          &lines,
          absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", now, absl::UTCTimeZone()),
          " job ", name, ": ", text, "\n");
    }
    if (lines.empty()) return absl::OkStatus();
    v1::Job message = look.value_or(v1::Job());
    message.set_name(name);
    if (!look.has_value()) message.set_reason("there is no such job");
    return PrintOne(context_, message, lines);
  }

  const Context& context_;
  const WatchOptions& options_;
  std::map<std::string, JobWatch> watches_;
};

absl::Status Run(const Context& context, const WatchOptions& options) {
  std::optional<WatchGoal> goal;
  if (!options.until.empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(goal, ParseGoal(options.until));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  Watch watch(context, options);
  DaemonAbsence absence(absl::Seconds(context.timeout_s));
  do {
    const absl::StatusOr<JobLook> look = watch.LookOnce();
    OPTSTATE_RETURN_IF_ERROR(absence.Judge(look.status(), absl::Now()));
    if (!look.ok() || !goal.has_value()) continue;
    OPTSTATE_ASSIGN_OR_RETURN(const bool reached, IsReached(*goal, *look));
    if (reached) return absl::OkStatus();
  } while (!interrupt.Await(absl::Seconds(options.interval_s)));
  if (!goal.has_value()) return absl::OkStatus();
  return absl::CancelledError(
      absl::StrCat("interrupted before ", options.until));
}

std::string CheckInterval(const std::string& text) {
  double s = 0;
  if (absl::SimpleAtod(text, &s) && s >= 0.1 && s <= 3600) return "";
  return absl::StrCat(text, " is not from 0.1 to 3600 seconds");
}

void AddIntervals(CLI::App* command, WatchOptions* options) {
  command
      ->add_option("--interval", options->interval_s,
                   "Seconds from one look to the next (1)")
      ->check(CLI::Validator(CheckInterval, "SECONDS"));
  command
      ->add_option("--steps-every", options->step_interval_s,
                   "Seconds from one committed step that is shown to the next "
                   "(10)")
      ->check(CLI::Validator(CheckInterval, "SECONDS"));
}

}  // namespace

void AddWatchCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "watch",
      "A line for each change of a job: phase, ranks, committed step, roll "
      "back, restart; for scripts, waits until something is reached");
  command->require_subcommand(1);
  const auto add = [&context](CLI::App* verb) {
    auto options = std::make_shared<WatchOptions>();
    AddIntervals(verb, options.get());
    verb->callback([&context, options] {
      context.run = [&context, options] { return Run(context, *options); };
    });
    return options;
  };
  add(command->add_subcommand(
      "jobs", "Every job, until Ctrl-C; -o json gives an object a line"));
  CLI::App* job = command->add_subcommand(
      "job",
      "One job, until Ctrl-C or --until; waits (--timeout) for a daemon that "
      "is away");
  const auto options = add(job);
  job->add_option("name", options->job, "The job's name")->required();
  job->add_option("--until", options->until,
                  "Ends with exit code 0 once this is so: committed_step=N, "
                  "phase=ready|failed|..., deleted. Ends with 3 when there is "
                  "no such job, with 4 when it is FAILED instead")
      ->check(CLI::Validator(
          [](const std::string& text) {
            return std::string(ParseGoal(text).status().message());
          },
          "GOAL"));
}

}  // namespace optstate::ctl
