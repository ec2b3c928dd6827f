#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/access_settings.h"
#include "client/ctl/command.h"
#include "client/ctl/fraction_search.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/job_settings.h"
#include "client/ctl/offload_search.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/set_progress.h"
#include "client/ctl/show_while.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Interval at which optctl asks how far records have been written anew.
constexpr auto kLookInterval = std::chrono::milliseconds(200);

// Interval at which it asks how far other settings are, and how long it shows
// nothing of that: most are in force at once.
constexpr absl::Duration kSetInterval = absl::Milliseconds(200);
constexpr absl::Duration kQuietTime = absl::Seconds(1);

// Interval at which optctl asks whether a job has taken a step.
constexpr absl::Duration kStepInterval = absl::Milliseconds(50);

// How often a change of the access is tried anew, because another caller has
// made one meanwhile.
constexpr int kAccessTriesMax = 20;

// Has optctl find the fraction by measurement.
constexpr char kAutoOffload[] = "offload_fraction=auto";

// Says what becomes of a change of which optctl has heard nothing for too long.
absl::Status WithRest(const std::string& name, const absl::Status& status) {
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(),
                   ". If the engine has begun to write records anew, it goes "
                   "on, and so does training; the same command waits on, and "
                   "`optctl describe job ",
                   name, "` shows how far it is, and the weights in force"));
}

// Has the records of a job written anew, and shows how far that has come.
class Rewriting {
 public:
  Rewriting(const Context& context, const v1::SetJobRequest& request)
      : request_(request), line_(context.machine_readable()) {}

  // Waits for the end as long as the records come on, however often the call
  // has to be made again: it then waits for the one before.
  absl::StatusOr<v1::SetJobReply> Run(const Context& context) {
    OPTSTATE_ASSIGN_OR_RETURN(const auto asking, context.Connect());
    OPTSTATE_ASSIGN_OR_RETURN(const auto looking, context.Connect());
    absl::StatusOr<v1::SetJobReply> reply;
    bool comes_on = true;
    while (comes_on) {
      const std::string before = last_;
      std::future<absl::StatusOr<v1::SetJobReply>> asked = std::async(
          std::launch::async, [&] { return asking->SetJob(request_); });
      while (asked.wait_for(kLookInterval) != std::future_status::ready) {
        Look(looking.get());
      }
      reply = asked.get();
      comes_on = absl::IsDeadlineExceeded(reply.status()) && last_ != before;
    }
    OPTSTATE_RETURN_IF_ERROR(line_.End(""));
    if (absl::IsDeadlineExceeded(reply.status())) {
      return WithRest(request_.name(), reply.status());
    }
    return reply;
  }

 private:
  void Look(AdminClient* client) {
    const absl::StatusOr<v1::Job> job =
        client->GetJob(request_.name(), /*memory=*/false);
    // The call that is looked at says what is wrong.
    if (!job.ok() || job->open_load().empty()) return;
    last_ = job->open_load();
    line_.Show("", absl::StrCat("job ", request_.name(), ": ", last_));
  }

  const v1::SetJobRequest& request_;
  ProgressLine line_;
  std::string last_;  // where it was seen last
};

// Returns the bytes of a job's files in memory; 0: not known.
uint64_t MemoryOf(const std::string& job, AdminClient* client) {
  const absl::StatusOr<v1::DescribeTiersReply> tiers =
      client->DescribeTiers(v1::DescribeTiersRequest());
  if (!tiers.ok()) return 0;
  for (const v1::TierJob& each : tiers->memory().jobs()) {
    if (each.job() == job) return each.bytes();
  }
  return 0;
}

// Returns how far other settings are. `client`: null when there is no time to
// ask.
std::string LookAtSettings(const std::string& name, AdminClient* client,
                           absl::Duration left, SetProgress* progress) {
  if (client == nullptr) return progress->Waiting(left);
  const absl::StatusOr<v1::Job> job = client->GetJob(name, /*memory=*/false);
  // The call that is looked at says what is wrong.
  if (!job.ok()) return progress->Waiting(left);
  const bool may_ask = progress->needs_memory() && job->has_disk();
  return progress->Look(*job, may_ask ? MemoryOf(name, client) : 0, absl::Now(),
                        left);
}

absl::StatusOr<v1::SetJobReply> Set(const Context& context,
                                    const v1::SetJobRequest& request) {
  if (!request.directory_weights().empty() ||
      request.directory_weights_auto()) {
    return Rewriting(context, request).Run(context);
  }
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  std::future<absl::StatusOr<v1::SetJobReply>> asked =
      std::async(std::launch::async, [&] { return client->SetJob(request); });
  SetProgress progress(request);
  const absl::Status told = ShowWhile(
      context, {.interval = kSetInterval, .quiet = kQuietTime},
      [&asked](absl::Duration time) {
        return asked.wait_for(absl::ToChronoNanoseconds(time)) ==
               std::future_status::ready;
      },
      [&](AdminClient* looking, absl::Duration left) {
        return LookAtSettings(request.name(), looking, left, &progress);
      });
  absl::StatusOr<v1::SetJobReply> reply = asked.get();
  if (reply.ok() && !told.ok()) return told;
  return reply;
}

absl::Status OlderDaemon(const std::string& name) {
  return absl::UnimplementedError(absl::StrCat(
      "the daemon is of an older build, which takes no notice of group, "
      "private and readers: everybody may look at job ",
      name, ". `optctl upgrade` puts a newer one in its place"));
}

// The request replaces who may use the job, whole: what is not named is taken
// from what there is. ABORTED: another caller has changed that meanwhile.
absl::Status TryToSetAccess(const Context& context, const std::string& name,
                            const AccessChange& change, AdminClient* client) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::Job job,
                            client->GetJob(name, /*memory=*/false));
  if (!job.has_access()) return OlderDaemon(name);
  v1::SetJobRequest request;
  request.set_name(name);
  *request.mutable_access_before() = job.access();
  OPTSTATE_ASSIGN_OR_RETURN(*request.mutable_access(),
                            ChangedAccess(job.access(), change));
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SetJobReply reply,
                            client->SetJob(request));
  return PrintDone(
      context, reply,
      absl::StrCat("job ", name, ": ", AccessText(request.access()), "\n"));
}

absl::Status SetAccess(const Context& context, const std::string& name,
                       const AccessChange& change) {
  OPTSTATE_ASSIGN_OR_RETURN(const auto client, context.Connect());
  absl::Status status;
  for (int i = 0; i < kAccessTriesMax; ++i) {
    status = TryToSetAccess(context, name, change, client.get());
    if (!absl::IsAborted(status)) break;
  }
  return status;
}

// Tries fractions while the job trains, shows how far that is, and leaves the
// fastest one set.
absl::Status TuneOffload(const Context& context, const std::string& name) {
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  OPTSTATE_ASSIGN_OR_RETURN(const auto client, context.Connect());
  ProgressLine line(context.machine_readable());
  v1::SetJobReply reply;
  OffloadControls controls;
  controls.look = [&] { return client->GetJob(name, /*memory=*/false); };
  controls.set = [&](double fraction) -> absl::Status {
    v1::SetJobRequest request;
    request.set_name(name);
    request.set_offload_fraction(fraction);
    OPTSTATE_ASSIGN_OR_RETURN(reply, client->SetJob(request));
    return absl::OkStatus();
  };
  controls.await = [&] { return interrupt.Await(kStepInterval); };
  controls.show = [&](const std::string& text) { line.Show("", text); };
  const absl::StatusOr<FractionSearch> found = SearchOffload(name, controls);
  OPTSTATE_RETURN_IF_ERROR(line.End(""));
  OPTSTATE_RETURN_IF_ERROR(found.status());
  return PrintDone(context, reply,
                   absl::StrCat("job ", name, ": ", OffloadSearchText(*found),
                                "; ", JobSettingsText(reply), "\n"));
}

absl::Status Run(const Context& context, const std::string& name,
                 const std::vector<std::string>& settings) {
  if (std::find(settings.begin(), settings.end(), kAutoOffload) !=
      settings.end()) {
    if (settings.size() == 1) return TuneOffload(context, name);
    return absl::InvalidArgumentError(
        absl::StrCat(kAutoOffload,
                     " takes many steps, and is set by itself: set the others "
                     "before or after it"));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<AccessChange> access,
                            ParseAccessChange(settings));
  if (access.has_value()) return SetAccess(context, name, *access);
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SetJobRequest request,
                            ParseJobSettings(name, settings));
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SetJobReply reply, Set(context, request));
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
      "the daemon's devices the others; by itself offload_fraction=auto: tries "
      "some while the job trains, and keeps the fastest (Ctrl-C: so far); "
      "device_budget=8GiB: the memory of each device for records that stay "
      "there, 0 for none; "
      "directory_weights=3,1 or auto: which part of the records each of the "
      "daemon's directories gets, which are written anew while training goes "
      "on (optctl shows how far it is; --timeout bounds a silence; the weights "
      "in force end that). In force between two steps, and for later engines "
      "too. By themselves, also of a job that sleeps or has FAILED, for its "
      "owner and operators: "
      "group=research: the group whose members may do with the job what its "
      "owner may; private=true: others see no such job; "
      "readers=alice,@ops: users and groups who may look at a private job; an "
      "empty value clears");
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
