#include "tests/load/job_fleet.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"
#include "tests/load/first_error.h"

namespace optstate::load {
namespace {

using client::Session;

// How many jobs are opened at once: each has an engine started.
constexpr size_t kOpeners = 4;
// A machine with far more processes than cores is slow, and not hung.
constexpr absl::Duration kConnectTimeout = absl::Seconds(120);
constexpr absl::Duration kStepTimeout = absl::Seconds(300);
constexpr float kFirstValue = 1;
// Four of these bytes are a float32 of about 0.747, two a bfloat16.
constexpr int kGradientByte = 0x3f;

// Loads all ranks of a job: none finishes before the others do.
absl::Status LoadRanks(const std::vector<std::unique_ptr<Session>>& ranks) {
  FirstError error;
  std::vector<std::thread> threads;
  threads.reserve(ranks.size());
  for (const auto& rank : ranks) {
    threads.emplace_back([&error, session = rank.get()] {
      error.Note(LoadConstant(*session, kFirstValue));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return error.status();
}

// Writes the gradients that every step of the rank has.
absl::Status FillGradients(Session& session) {
  for (size_t i = 0; i < session.piece_count(); ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(const absl::Span<std::byte> gradient,
                              session.gradient(i));
    std::memset(gradient.data(), kGradientByte, gradient.size());
  }
  return absl::OkStatus();
}

}  // namespace

JobFleet::JobFleet(Options options) : options_(std::move(options)) {
  jobs_.resize(options_.jobs);
  for (uint32_t i = 0; i < options_.jobs; ++i) {
    jobs_[i].name = absl::StrCat(options_.prefix, "-", i);
    jobs_[i].world_size = options_.sessions / options_.jobs +
                          (i < options_.sessions % options_.jobs ? 1 : 0);
  }
}

absl::Status JobFleet::CheckSpread(uint32_t jobs, uint32_t sessions) {
  if (jobs != 0 && sessions >= jobs) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      sessions, " sessions cannot be spread over ", jobs,
      " jobs: at least one job is needed, and one session for each"));
}

absl::StatusOr<std::unique_ptr<JobFleet>> JobFleet::Open(Options options) {
  OPTSTATE_RETURN_IF_ERROR(CheckSpread(options.jobs, options.sessions));
  std::unique_ptr<JobFleet> fleet(new JobFleet(std::move(options)));
  OPTSTATE_RETURN_IF_ERROR(fleet->OpenAll());
  return fleet;
}

absl::Status JobFleet::OpenAll() {
  FirstError error;
  std::atomic<size_t> next{0};
  std::vector<std::thread> openers;
  for (size_t i = 0; i < std::min(kOpeners, jobs_.size()); ++i) {
    openers.emplace_back([this, &error, &next] {
      while (error.status().ok()) {
        const size_t index = next.fetch_add(1);
        if (index >= jobs_.size()) return;
        error.Note(OpenJob(index));
      }
    });
  }
  for (std::thread& opener : openers) opener.join();
  return error.status();
}

client::SessionOptions JobFleet::RankOptions(size_t job, uint32_t rank) const {
  const uint32_t world_size = jobs_[job].world_size;
  client::SessionOptions options;
  options.endpoint = options_.endpoint;
  options.job = jobs_[job].name;
  // Every rank owns something.
  options.layout = UniformLayout(
      world_size, std::max<int64_t>(options_.elements / world_size, 1));
  options.rank = rank;
  options.world_size = world_size;
  options.connect_timeout = kConnectTimeout;
  options.step_timeout = kStepTimeout;
  return options;
}

absl::Status JobFleet::OpenJob(size_t index) {
  Job& job = jobs_[index];
  for (uint32_t rank = 0; rank < job.world_size; ++rank) {
    OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Session> session,
                              Session::Open(RankOptions(index, rank)));
    job.ranks.push_back(std::move(session));
  }
  OPTSTATE_RETURN_IF_ERROR(LoadRanks(job.ranks));
  for (const auto& rank : job.ranks) {
    OPTSTATE_RETURN_IF_ERROR(FillGradients(*rank));
  }
  return absl::OkStatus();
}

absl::Status JobFleet::StepJob(Job* job) const {
  const uint64_t step = job->steps + 1;
  for (const auto& rank : job->ranks) {
    OPTSTATE_RETURN_IF_ERROR(rank->Push(
        step, 0, 0, static_cast<uint32_t>(rank->layout().parameters().size())));
  }
  for (const auto& rank : job->ranks) {
    OPTSTATE_RETURN_IF_ERROR(rank->CommitStart(CommitOf(*rank, step)));
  }
  for (const auto& rank : job->ranks) {
    OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome outcome,
                              rank->CommitWait());
    if (outcome.step != step || !outcome.applied) {
      return absl::InternalError(
          absl::StrCat("job ", job->name, ": step ", step, " was answered as ",
                       outcome.step, outcome.applied ? "" : ", not applied"));
    }
  }
  job->steps = step;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> JobFleet::Step(const Stretch& stretch) {
  FirstError error;
  std::vector<std::vector<double>> times_ms(jobs_.size());
  std::vector<std::thread> threads;
  threads.reserve(jobs_.size());
  for (size_t i = 0; i < jobs_.size(); ++i) {
    threads.emplace_back([this, i, &stretch, &error, &times_ms] {
      error.Note(StepStretch(&jobs_[i], stretch, &error, &times_ms[i]));
    });
  }
  for (std::thread& thread : threads) thread.join();
  OPTSTATE_RETURN_IF_ERROR(error.status());
  std::vector<double> all;
  for (const std::vector<double>& times : times_ms) {
    all.insert(all.end(), times.begin(), times.end());
  }
  return all;
}

absl::Status JobFleet::StepStretch(Job* job, const Stretch& stretch,
                                   const FirstError* error,
                                   std::vector<double>* times_ms) const {
  const absl::Time begin = absl::Now();
  const absl::Time end = begin + stretch.time;
  absl::Time due = begin;
  for (uint64_t taken = 0; taken < stretch.count; ++taken) {
    // A job that is late takes its next step at once.
    if (due > absl::Now()) absl::SleepFor(due - absl::Now());
    const absl::Time step_begin = absl::Now();
    if (step_begin >= end || !error->status().ok()) break;
    OPTSTATE_RETURN_IF_ERROR(StepJob(job));
    const absl::Time step_end = absl::Now();
    times_ms->push_back(absl::ToDoubleMilliseconds(step_end - step_begin));
    due = std::max(due + options_.step_interval, step_end);
  }
  return absl::OkStatus();
}

std::vector<std::string> JobFleet::names() const {
  std::vector<std::string> names;
  names.reserve(jobs_.size());
  for (const Job& job : jobs_) names.push_back(job.name);
  return names;
}

absl::Status JobFleet::CheckRanks() const {
  for (const Job& job : jobs_) {
    for (const auto& rank : job.ranks) {
      if (rank->committed_step() == job.steps) continue;
      return absl::InternalError(
          absl::StrCat("a rank of job ", job.name, " is at step ",
                       rank->committed_step(), " of ", job.steps));
    }
  }
  return absl::OkStatus();
}

}  // namespace optstate::load
