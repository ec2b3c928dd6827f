#ifndef OPTSTATE_SERVER_OBSERVE_PEER_LOG_H_
#define OPTSTATE_SERVER_OBSERVE_PEER_LOG_H_

#include <spdlog/spdlog.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace optstate::observe {

// Decides which of the lines that may come in any number are written: for each
// kind and each peer, or other subject, a burst at once, and after that as many
// as the rate says. Suppressed lines are counted, and the count is written.
//
// Threads: thread-safe.
class LineLimiter {
 public:
  // The rate of lines that peers can cause at will.
  static constexpr double kBurst = 200;
  static constexpr double kLinesPerSecond = 1;
  // Number of pairs of kind and peer with a budget of their own; further ones
  // share one.
  static constexpr size_t kKeysMax = 1024;

  struct Rate {
    double burst = kBurst;
    double lines_per_s = kLinesPerSecond;
  };
  using Clock = std::function<absl::Time()>;
  explicit LineLimiter(Clock clock = absl::Now)
      : LineLimiter(Rate(), std::move(clock)) {}
  explicit LineLimiter(const Rate& rate, Clock clock = absl::Now)
      : rate_(rate), clock_(std::move(clock)) {}

  // The counts of suppressed lines to write now, then whether this line is
  // written.
  struct Verdict {
    std::vector<std::string> left_out;
    bool write = false;
  };
  Verdict Judge(absl::string_view kind, absl::string_view peer);
  // Returns the counts of suppressed lines that were not written yet, and
  // clears them.
  std::vector<std::string> TakeLeftOut();

 private:
  using Key = std::pair<std::string, std::string>;  // kind, peer
  struct Budget {
    double lines = 0;
    absl::Time at;
    uint64_t left_out = 0;
    absl::Time first_left_out = absl::InfinitePast();
  };

  void Refill(absl::Time now, Budget* budget) const;
  void TakeOld(absl::Time now, absl::Duration age,
               std::vector<std::string>* texts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Rate rate_;
  const Clock clock_;
  absl::Mutex mutex_;
  absl::Time next_look_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::map<Key, Budget> budgets_ ABSL_GUARDED_BY(mutex_);
};

// The limiters of the process. That of lines which come again, with each step
// or each start of an engine, lets a fault show and then leaves it alone: 20
// lines at once, and one every 10 s after that.
LineLimiter& PeerLines();
LineLimiter& RepeatedLines();

// Takes the place of RepeatedLines() while it exists, for a program that runs
// many daemons. One at a time, and no other thread logs when it begins or ends.
class ScopedRepeatedLines {
 public:
  explicit ScopedRepeatedLines(LineLimiter* limiter);
  ~ScopedRepeatedLines();
  ScopedRepeatedLines(const ScopedRepeatedLines&) = delete;
  ScopedRepeatedLines& operator=(const ScopedRepeatedLines&) = delete;
};

// Writes a line unless there were too many of its kind and subject.
template <typename... Args>
void LogLimited(LineLimiter& limiter, spdlog::level::level_enum level,
                absl::string_view kind, absl::string_view subject,
                spdlog::format_string_t<Args...> format, Args&&... args) {
  if (!spdlog::should_log(level)) return;
  const LineLimiter::Verdict verdict = limiter.Judge(kind, subject);
  for (const std::string& text : verdict.left_out) spdlog::warn("{}", text);
  if (verdict.write) spdlog::log(level, format, std::forward<Args>(args)...);
}

// Writes a line that a peer can cause at will, unless this peer ("uid 1000")
// has caused too many of its kind.
template <typename... Args>
void LogOfPeer(spdlog::level::level_enum level, absl::string_view kind,
               absl::string_view peer, spdlog::format_string_t<Args...> format,
               Args&&... args) {
  LogLimited(PeerLines(), level, kind, peer, format,
             std::forward<Args>(args)...);
}

// Writes a line that may come again and again without a peer's doing, unless
// too many of its kind came of this subject ("job gpt").
template <typename... Args>
void LogRepeated(spdlog::level::level_enum level, absl::string_view kind,
                 absl::string_view subject,
                 spdlog::format_string_t<Args...> format, Args&&... args) {
  LogLimited(RepeatedLines(), level, kind, subject, format,
             std::forward<Args>(args)...);
}

// Writes the counts of suppressed lines, also when no later line brought them
// along.
void LogLeftOut();

// Routes gRPC's own lines into this log, limited as those of one peer: the text
// that they quote was written by strangers.
void RouteGrpcLog();
// Routes protobuf's lines in the same way: a message with a string that is not
// UTF-8 makes it write one to stderr.
void RouteProtobufLog();

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_PEER_LOG_H_
