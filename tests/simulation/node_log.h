#ifndef OPTSTATE_TESTS_SIMULATION_NODE_LOG_H_
#define OPTSTATE_TESTS_SIMULATION_NODE_LOG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/observe/peer_log.h"
#include "spdlog/spdlog.h"

namespace optstate::simulation {

// Counts the lines that the process logs, by the node whose code is running,
// while it exists; nothing is printed. Takes the place of spdlog's default
// logger.
//
// Threads: one at a time; and no other thread logs. One at a time exists.
class NodeLog {
 public:
  explicit NodeLog(uint32_t nodes);
  ~NodeLog();
  NodeLog(const NodeLog&) = delete;
  NodeLog& operator=(const NodeLog&) = delete;

  // Counts what is logged while it exists as lines of this node.
  class Scope {
   public:
    Scope(NodeLog* log, uint32_t node);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    NodeLog& log_;
    const uint32_t former_;
  };

  const std::vector<uint64_t>& lines() const { return lines_; }
  // The lines outside of all scopes, which no real daemon would have written.
  uint64_t lines_of_none() const { return lines_of_none_; }
  // The first line of level error, for a report; empty: there was none.
  const std::string& first_error() const { return first_error_; }

 private:
  class Sink;
  static constexpr uint32_t kNone = UINT32_MAX;

  void Note(spdlog::level::level_enum level, const std::string& text);

  std::vector<uint64_t> lines_;
  uint64_t lines_of_none_ = 0;
  std::string first_error_;
  uint32_t node_ = kNone;
  std::shared_ptr<spdlog::logger> former_;
  // The nodes share a process and would share its budget, in real time.
  observe::LineLimiter unlimited_{{.burst = 1e9}};
  const observe::ScopedRepeatedLines scope_{&unlimited_};
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_NODE_LOG_H_
