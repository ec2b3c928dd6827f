#include "tests/simulation/node_log.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/details/null_mutex.h"
#include "spdlog/sinks/base_sink.h"

namespace optstate::simulation {

class NodeLog::Sink final
    : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit Sink(NodeLog* log) : log_(*log) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    log_.Note(message.level,
              std::string(message.payload.data(), message.payload.size()));
  }
  void flush_() override {}

  NodeLog& log_;
};

NodeLog::NodeLog(uint32_t nodes)
    : lines_(nodes, 0), former_(spdlog::default_logger()) {
  auto logger = std::make_shared<spdlog::logger>("simulated",
                                                 std::make_shared<Sink>(this));
  logger->set_level(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

NodeLog::~NodeLog() { spdlog::set_default_logger(std::move(former_)); }

NodeLog::Scope::Scope(NodeLog* log, uint32_t node)
    : log_(*log), former_(log->node_) {
  log_.node_ = node;
}

NodeLog::Scope::~Scope() { log_.node_ = former_; }

void NodeLog::Note(spdlog::level::level_enum level, const std::string& text) {
  if (node_ == kNone) {
    ++lines_of_none_;
  } else {
    ++lines_[node_];
  }
  if (level >= spdlog::level::err && first_error_.empty()) {
    first_error_ =
        node_ == kNone ? text : absl::StrCat("node ", node_, ": ", text);
  }
}

}  // namespace optstate::simulation
