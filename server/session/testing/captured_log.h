#ifndef OPTSTATE_SERVER_SESSION_TESTING_CAPTURED_LOG_H_
#define OPTSTATE_SERVER_SESSION_TESTING_CAPTURED_LOG_H_

#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "spdlog/sinks/ostream_sink.h"
#include "spdlog/spdlog.h"

namespace optstate::session {

// Takes the lines that this process logs, as "level text", while it exists.
// Threads: Text() while no other thread logs.
class CapturedLog {
 public:
  CapturedLog() : former_(spdlog::default_logger()) {
    auto logger = std::make_shared<spdlog::logger>(
        "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_));
    logger->set_pattern("%l %v");
    spdlog::set_default_logger(std::move(logger));
  }
  ~CapturedLog() { spdlog::set_default_logger(former_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  std::string Text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  const std::shared_ptr<spdlog::logger> former_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_CAPTURED_LOG_H_
