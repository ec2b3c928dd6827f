#include "server/supervisor/job_events.h"

#include <spdlog/spdlog.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/observe/event_budget.h"
#include "server/observe/event_log.h"
#include "server/observe/node_event.h"
#include "server/observe/peer_log.h"

namespace optstate::supervisor {
namespace {

using spdlog::level::level_enum;

v1::EventSeverity SeverityOf(level_enum level) {
  switch (level) {
    case level_enum::err:
      return v1::EVENT_SEVERITY_ERROR;
    case level_enum::warn:
      return v1::EVENT_SEVERITY_WARNING;
    default:
      return v1::EVENT_SEVERITY_INFO;
  }
}

std::string TimeText(absl::Duration took) {
  return absl::StrFormat("%.2f s", absl::ToDoubleSeconds(took));
}

// The part that one user's jobs may have of events of lost ranks.
struct LossBudget {
  static constexpr double kBurst = 64;
  static constexpr absl::Duration kInterval = absl::Seconds(10);

  observe::EventBudget budget{kBurst, kInterval};
  std::string last_job;
};

// Losses that were left out, of jobs of one user.
struct LeftOutLosses {
  uid_t owner;
  std::string last_job;
  uint64_t count;
};

// The budgets of all users. There are as many as users have had jobs.
//
// Threads: thread-safe.
class LossBudgets {
 public:
  // As EventBudget::Take(), for a loss of a job of this user.
  std::optional<uint64_t> Take(uid_t owner, const std::string& job,
                               uint64_t already_left_out) {
    const absl::MutexLock lock(&mutex_);
    LossBudget& of_user = budgets_[owner];
    of_user.last_job = job;
    return of_user.budget.Take(already_left_out);
  }

  // Returns what was left out and may be told now.
  std::vector<LeftOutLosses> TakeLeftOut() {
    const absl::MutexLock lock(&mutex_);
    std::vector<LeftOutLosses> all;
    for (auto& [owner, of_user] : budgets_) {
      const uint64_t count = of_user.budget.TakeLeftOut();
      if (count != 0) all.push_back({owner, of_user.last_job, count});
    }
    return all;
  }

 private:
  absl::Mutex mutex_;
  std::map<uid_t, LossBudget> budgets_ ABSL_GUARDED_BY(mutex_);
};

LossBudgets& Budgets() {
  static LossBudgets& budgets = *new LossBudgets;
  return budgets;
}

std::string By(const std::string& by) {
  return by.empty() ? "" : absl::StrCat(" by ", by);
}

}  // namespace

void JobEvents::Tell(level_enum level, absl::string_view kind,
                     absl::string_view text, const std::string& by) const {
  // An engine that dies again and again does not fill the log.
  observe::LogRepeated(level, kind, absl::StrCat("job ", job_), "job {}: {}{}",
                       job_, std::string(text), By(by));
  v1::Event event;
  event.set_severity(SeverityOf(level));
  event.set_kind(std::string(kind));
  event.set_job(job_);
  event.set_text(std::string(text));
  event.set_owner_uid(owner_);
  event.set_actor(by);
  observe::Events().Add(std::move(event));
}

void JobEvents::Created(absl::string_view access) const {
  Tell(level_enum::info, "job_created",
       absl::StrCat("created", access.empty() ? "" : ", ", access),
       observe::ActorName(owner_));
}

void JobEvents::Over() const {
  Tell(level_enum::info, "job_over", "over: it has ended by itself");
}

void JobEvents::Deleted(const std::string& by) const {
  Tell(level_enum::info, "job_deleted", "deleted", by);
}

void JobEvents::NotDeleted(const std::string& by,
                           const absl::Status& why) const {
  Tell(level_enum::err, "job_not_deleted",
       absl::StrCat("not wholly deleted: ", why.ToString()), by);
}

void JobEvents::Recovering(const std::string& by, bool to_durable) const {
  Tell(level_enum::info, "job_recovering",
       absl::StrCat("its engine is started again",
                    to_durable ? " at the last durable step" : ""),
       by);
}

void JobEvents::SettingsChanged(const std::string& by,
                                absl::string_view settings) const {
  Tell(level_enum::info, "job_set", absl::StrCat("set: ", settings), by);
}

void JobEvents::AccessChanged(const std::string& by,
                              absl::string_view access) const {
  Tell(level_enum::info, "job_access_set",
       absl::StrCat("who may use it: ", access), by);
}

void JobEvents::DamageFound(const std::string& by, uint64_t records) const {
  Tell(level_enum::err, "damage_found",
       absl::StrCat(records, " records are damaged on disk, found by `verify`"),
       by);
}

void JobEvents::EngineReady(pid_t engine, bool adopted) const {
  Tell(level_enum::info, adopted ? "engine_adopted" : "engine_started",
       absl::StrCat("engine ", engine, " is ready",
                    adopted ? ", and was running before" : ""));
}

void JobEvents::EngineNotStarted(absl::string_view why) const {
  Tell(level_enum::err, "engine_not_started",
       absl::StrCat("its engine could not be started: ", why));
}

void JobEvents::EngineKilled(pid_t engine, absl::string_view failed_to) const {
  Tell(level_enum::err, "engine_killed",
       absl::StrCat("engine ", engine, " did not ", failed_to,
                    ", and is killed"));
}

void JobEvents::EngineDied(pid_t engine, absl::string_view how) const {
  Tell(level_enum::err, "engine_died",
       absl::StrCat("engine ", engine, " ", how));
}

void JobEvents::RankLost(uint32_t rank, uint64_t committed_step,
                         absl::string_view reason,
                         uint64_t left_out_before) const {
  const std::optional<uint64_t> left_out =
      Budgets().Take(owner_, job_, left_out_before);
  if (!left_out.has_value()) return;
  std::string text = absl::StrCat("rank ", rank, " lost at step ",
                                  committed_step, ": ", reason);
  if (*left_out != 0) {
    absl::StrAppend(
        &text, "; ", *left_out,
        " losses of ranks of this user's jobs were left out before");
  }
  Tell(level_enum::warn, "rank_lost", text);
}

void JobEvents::TellLossesLeftOut() {
  for (const LeftOutLosses& one : Budgets().TakeLeftOut()) {
    JobEvents(one.last_job, one.owner)
        .Tell(level_enum::warn, "rank_lost",
              absl::StrCat(one.count,
                           " further losses of ranks of this user's jobs were "
                           "left out"));
  }
}

void JobEvents::Asleep(absl::string_view folder, uint64_t disk_bytes,
                       uint64_t memory_bytes, absl::Duration took) const {
  Tell(level_enum::info, "job_asleep",
       absl::StrCat("asleep in ", folder, ": ", disk_bytes, " bytes there, ",
                    memory_bytes, " bytes of memory given back, in ",
                    TimeText(took)));
}

void JobEvents::NotPutToSleep(const absl::Status& why, uint64_t copied_bytes,
                              absl::Duration took) const {
  Tell(level_enum::err, "job_sleep_failed",
       absl::StrCat("not put to sleep, after ", copied_bytes, " bytes and ",
                    TimeText(took), ": ", why.ToString()));
}

void JobEvents::Awake(uint64_t disk_bytes, uint64_t memory_bytes,
                      absl::Duration took) const {
  Tell(level_enum::info, "job_awake",
       absl::StrCat("awake: ", disk_bytes, " bytes read back, ", memory_bytes,
                    " bytes of memory taken again, in ", TimeText(took)));
}

void JobEvents::NotWoken(const absl::Status& why, uint64_t copied_bytes,
                         absl::Duration took) const {
  Tell(level_enum::err, "job_wake_failed",
       absl::StrCat("not woken, after ", copied_bytes, " bytes and ",
                    TimeText(took), ": ", why.ToString()));
}

void JobEvents::Failed(absl::string_view why, absl::string_view kept) const {
  Tell(level_enum::err, "job_failed",
       absl::StrCat("FAILED: ", why, ". ", kept));
}

void JobEvents::GivenUp(absl::string_view why) const {
  Tell(level_enum::err, "job_given_up",
       absl::StrCat("its engine cannot be started: ", why,
                    "; it has no state and is removed"));
}

}  // namespace optstate::supervisor
