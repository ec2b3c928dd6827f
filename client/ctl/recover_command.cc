#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/names.h"
#include "client/ctl/progress_text.h"
#include "client/ctl/show_while.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

constexpr absl::Duration kLookInterval = absl::Milliseconds(200);
// A start that takes no longer says its end alone.
constexpr absl::Duration kQuietTime = absl::Seconds(1);

// Returns the bytes of a job on all disks; 0: none, or not known.
uint64_t DiskBytesOf(const std::string& job, AdminClient* client) {
  uint64_t bytes = 0;
  const absl::StatusOr<v1::DescribeTiersReply> tiers =
      client->DescribeTiers(v1::DescribeTiersRequest());
  if (!tiers.ok()) return 0;
  for (const v1::DirectoryTier& directory : tiers->directories()) {
    for (const v1::TierJob& each : directory.jobs()) {
      if (each.job() == job) bytes += each.bytes();
    }
  }
  return bytes;
}

// Finds out whether a job's next engine says how the job is.
class Recovery {
 public:
  // `failed_engine`: the pid of an engine that called the job FAILED, and ends
  // first; 0: none ran.
  Recovery(std::string job, int64_t failed_engine)
      : name_(std::move(job)), failed_engine_(failed_engine) {}

  // Takes a look. Returns how far the start is.
  std::string Look(AdminClient* client, absl::Duration left) {
    const absl::Time now = absl::Now();
    if (client != nullptr) {
      absl::StatusOr<v1::Job> job = client->GetJob(name_, /*memory=*/false);
      is_gone_ = absl::IsNotFound(job.status());
      if (job.ok()) last_ = *std::move(job);
    }
    last_.set_name(name_);
    const bool reads = last_.engine_start().disk_bytes() != 0;
    // A rate counts from the first byte: the end of the former engine is none
    // of it.
    if (!reads) reads_since_ = now;
    if (reads && !read_max_.has_value() && client != nullptr) {
      read_max_ = DiskBytesOf(name_, client);
    }
    return RecoverProgressText(last_, read_max_.value_or(0), now - reads_since_,
                               left);
  }

  // Whether the next engine has said it, or there will be none.
  bool is_over() const {
    if (is_gone_) return true;
    if (last_.phase() == v1::JOB_PHASE_UNSPECIFIED) return false;
    return last_.phase() != v1::JOB_PHASE_FAILED || failed_engine_ == 0 ||
           last_.engine_pid() != failed_engine_;
  }

  // Returns what the wait has shown. NOT_FOUND: the job is gone;
  // DEADLINE_EXCEEDED: its engine is still being started; FAILED_PRECONDITION:
  // it is FAILED as before.
  absl::StatusOr<std::string> Result() const {
    if (is_gone_) {
      return absl::NotFoundError(
          absl::StrCat("job ", name_, " is no longer there"));
    }
    if (!is_over()) {
      return absl::DeadlineExceededError(absl::StrCat(
          "job ", name_, ": its engine is still being started; `optctl ",
          "describe job ", name_, "` shows how far it is"));
    }
    if (last_.phase() == v1::JOB_PHASE_FAILED) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", name_,
          ": its engine was started again, and the job is FAILED as before: ",
          last_.reason()));
    }
    std::string text = absl::StrCat(
        "job ", name_, ": its engine runs again, ", "phase ",
        Name(last_.phase()), ", committed step ", last_.committed_step());
    if (!last_.open_step().empty()) {
      absl::StrAppend(&text, "; ", last_.open_step());
    }
    return text;
  }

 private:
  const std::string name_;
  const int64_t failed_engine_;
  v1::Job last_;  // as it was seen last
  bool is_gone_ = false;
  absl::Time reads_since_ = absl::Now();
  std::optional<uint64_t> read_max_;
};

absl::Status Run(const Context& context, const std::string& name,
                 bool to_durable) {
  const absl::Time deadline = absl::Now() + absl::Seconds(context.timeout_s);
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::Job before,
                            client->GetJob(name, /*memory=*/false));
  OPTSTATE_ASSIGN_OR_RETURN(const v1::RecoverJobReply reply,
                            client->RecoverJob(name, to_durable));
  if (to_durable && !reply.to_durable()) {
    return absl::UnimplementedError(
        "this daemon is older than optctl and knows no --to-durable: it has "
        "started the job's engine again with what is in memory");
  }
  Recovery recovery(name, before.engine_pid());
  Context rest = context;
  rest.timeout_s =
      std::max(absl::ToDoubleSeconds(deadline - absl::Now()), 0.001);
  bool is_interrupted = false;
  const absl::Status told = ShowWhile(
      rest, {.interval = kLookInterval, .quiet = kQuietTime},
      [&](absl::Duration time) {
        if (recovery.is_over() || absl::Now() >= deadline) return true;
        is_interrupted = interrupt.Await(time);
        return is_interrupted;
      },
      [&](AdminClient* looking, absl::Duration left) {
        return recovery.Look(looking, left);
      });
  OPTSTATE_RETURN_IF_ERROR(told);
  if (is_interrupted) {
    return absl::CancelledError(absl::StrCat(
        "interrupted: the daemon goes on to start the engine of job ", name,
        "; `optctl describe job ", name, "` shows how far it is"));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::string result, recovery.Result());
  return PrintDone(context, reply, absl::StrCat(result, "\n"));
}

}  // namespace

void AddRecoverCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "recover",
      "Starts the engine of a FAILED job again, also one that runs, once what "
      "made it fail is mended (describe job says what). Waits (--timeout) "
      "until the engine says how the job is, and shows how far it is with its "
      "records; Ctrl-C ends optctl, and the daemon goes on");
  auto name = std::make_shared<std::string>();
  command->add_option("name", *name, "The job's name")->required();
  auto to_durable = std::make_shared<bool>(false);
  command->add_flag(
      "--to-durable", *to_durable,
      "Give up what the job has in memory, and go on at its last "
      "durable step, which is on disk; also of a job that has not "
      "failed, once no ranks are attached");
  command->callback([&context, name, to_durable] {
    context.run = [&context, name, to_durable] {
      return Run(context, *name, *to_durable);
    };
  });
}

}  // namespace optstate::ctl
