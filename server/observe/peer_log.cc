#include "server/observe/peer_log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "server/observe/counters.h"

namespace optstate::observe {
namespace {

// Suppressed lines are reported after this time at the latest, if TakeLeftOut()
// or Judge() is called.
constexpr absl::Duration kTellAfter = absl::Seconds(10);
constexpr absl::Duration kLookEvery = absl::Seconds(1);
constexpr LineLimiter::Rate kRepeatedRate = {.burst = 20, .lines_per_s = 0.1};

std::atomic<LineLimiter*> scoped_repeated{nullptr};

void WriteGrpcLine(gpr_log_func_args* args) {
  const auto level = args->severity == GPR_LOG_SEVERITY_ERROR
                         ? spdlog::level::warn
                         : spdlog::level::debug;
  LogOfPeer(level, "gRPC", "anybody", "gRPC: {}", args->message);
}

void WriteProtobufLine(google::protobuf::LogLevel level, const char* /*file*/,
                       int /*line*/, const std::string& text) {
  LogOfPeer(level >= google::protobuf::LOGLEVEL_WARNING ? spdlog::level::warn
                                                        : spdlog::level::debug,
            "protobuf", "anybody", "protobuf: {}", text);
}

}  // namespace

void LineLimiter::Refill(absl::Time now, Budget* budget) const {
  budget->lines = std::min(
      rate_.burst, budget->lines + rate_.lines_per_s *
                                       absl::ToDoubleSeconds(now - budget->at));
  budget->at = now;
}

void LineLimiter::TakeOld(absl::Time now, absl::Duration age,
                          std::vector<std::string>* texts) {
  for (auto it = budgets_.begin(); it != budgets_.end();) {
    auto& [key, budget] = *it;
    Refill(now, &budget);
    if (budget.left_out != 0 && now - budget.first_left_out >= age) {
      texts->push_back(absl::StrCat(
          budget.left_out, " lines left out: ", key.first, " of ", key.second));
      budget.left_out = 0;
    }
    // A full budget equals a new one.
    it = budget.left_out == 0 && budget.lines >= rate_.burst
             ? budgets_.erase(it)
             : std::next(it);
  }
}

LineLimiter::Verdict LineLimiter::Judge(absl::string_view kind,
                                        absl::string_view peer) {
  const absl::Time now = clock_();
  Verdict verdict;
  absl::MutexLock lock(&mutex_);
  if (now >= next_look_) {
    TakeOld(now, kTellAfter, &verdict.left_out);
    next_look_ = now + kLookEvery;
  }
  Key key(kind, peer);
  if (budgets_.size() >= kKeysMax && !budgets_.contains(key)) {
    key = {"lines", "others"};
  }
  Budget& budget =
      budgets_.try_emplace(key, Budget{.lines = rate_.burst, .at = now})
          .first->second;
  Refill(now, &budget);
  verdict.write = budget.lines >= 1;
  if (verdict.write) {
    budget.lines -= 1;
  } else {
    Count(Counted::kLogLineLeftOut);
    if (budget.left_out++ == 0) budget.first_left_out = now;
  }
  return verdict;
}

std::vector<std::string> LineLimiter::TakeLeftOut() {
  std::vector<std::string> texts;
  const absl::Time now = clock_();
  absl::MutexLock lock(&mutex_);
  TakeOld(now, absl::ZeroDuration(), &texts);
  return texts;
}

LineLimiter& PeerLines() {
  // The limiter is never destroyed: gRPC's threads log until the process ends.
  static LineLimiter& limiter = *new LineLimiter();
  return limiter;
}

LineLimiter& RepeatedLines() {
  static LineLimiter& limiter = *new LineLimiter(kRepeatedRate);
  LineLimiter* const scoped = scoped_repeated.load(std::memory_order_acquire);
  return scoped == nullptr ? limiter : *scoped;
}

ScopedRepeatedLines::ScopedRepeatedLines(LineLimiter* limiter) {
  scoped_repeated.store(limiter, std::memory_order_release);
}

ScopedRepeatedLines::~ScopedRepeatedLines() {
  scoped_repeated.store(nullptr, std::memory_order_release);
}

void LogLeftOut() {
  for (LineLimiter* const limiter : {&PeerLines(), &RepeatedLines()}) {
    for (const std::string& text : limiter->TakeLeftOut()) {
      spdlog::warn("{}", text);
    }
  }
}

void RouteGrpcLog() { gpr_set_log_function(WriteGrpcLine); }

void RouteProtobufLog() { google::protobuf::SetLogHandler(WriteProtobufLine); }

}  // namespace optstate::observe
