#include "server/observe/logging.h"

#include <spdlog/formatter.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "server/observe/log_json.h"
#include "server/observe/log_logfmt.h"
#include "server/observe/log_parts.h"
#include "server/observe/log_text.h"

namespace optstate::observe {
namespace {

std::atomic<LogFormat> current_format{LogFormat::kText};

// Returns the syslog priority of a level.
char Priority(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::critical:
      return '2';
    case spdlog::level::err:
      return '3';
    case spdlog::level::warn:
      return '4';
    case spdlog::level::info:
      return '6';
    default:
      return '7';
  }
}

// %* in a pattern: the syslog priority of the line's level.
class SyslogPriority : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    out.push_back(Priority(message.level));
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<SyslogPriority>();
  }
};

// The begin of an engine's name of itself, before the job's.
constexpr absl::string_view kEnginePrefix = "engine ";

std::string Pattern(absl::string_view process, bool journal) {
  // A job's name has no percent sign, but no other text should break the
  // pattern either.
  const std::string name = absl::StrReplaceAll(process, {{"%", "%%"}});
  if (journal) {
    // The journal knows the program, which is the same for all jobs' engines.
    const bool is_engine = absl::StartsWith(process, kEnginePrefix);
    return absl::StrCat("<%*>", is_engine ? name + ": " : "", "%&");
  }
  return absl::StrCat("%Y-%m-%dT%H:%M:%S.%eZ %~ ", name, "[%P] %&");
}

// %& in a pattern: the line's text, fit for one line. Text is escaped in this
// one place, so that no peer's text can look like a line of its own.
class EscapedText : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    const std::string text =
        LogText({message.payload.data(), message.payload.size()});
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<EscapedText>();
  }
};

// "warning" is 7 letters; the column has 5.
class ShortLevel : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    static constexpr absl::string_view kNames[] = {"trace", "debug", "info ",
                                                   "warn ", "error", "crit "};
    const auto level = static_cast<size_t>(message.level);
    const absl::string_view name = level < 6 ? kNames[level] : "?";
    out.append(name.data(), name.data() + name.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<ShortLevel>();
  }
};

// Writes each line as JSON or as logfmt.
class PartsFormatter : public spdlog::formatter {
 public:
  using Write = std::string (*)(const LogLine&);

  PartsFormatter(absl::string_view process, bool journal, Write write)
      : is_engine_(absl::ConsumePrefix(&process, kEnginePrefix)),
        job_(is_engine_ ? process : ""),
        journal_(journal),
        write_(write) {}

  void format(const spdlog::details::log_msg& message,
              spdlog::memory_buf_t& out) override {
    std::string line =
        write_({.time = absl::FromChrono(message.time),
                .level = LevelName(message.level),
                .process = is_engine_ ? "engine" : "supervisor",
                .pid = ::getpid(),
                .job = job_,
                .message = {message.payload.data(), message.payload.size()}});
    line.push_back('\n');
    if (journal_) line = absl::StrCat("<", PriorityText(message), ">", line);
    out.append(line.data(), line.data() + line.size());
  }
  std::unique_ptr<formatter> clone() const override {
    return std::make_unique<PartsFormatter>(*this);
  }

 private:
  static absl::string_view LevelName(spdlog::level::level_enum level) {
    static constexpr absl::string_view kNames[] = {
        "trace", "debug", "info", "warn", "error", "critical"};
    const auto number = static_cast<size_t>(level);
    return number < std::size(kNames) ? kNames[number] : "unknown";
  }
  static std::string PriorityText(const spdlog::details::log_msg& message) {
    return std::string(1, Priority(message.level));
  }

  const bool is_engine_;
  const std::string job_;  // empty: this process is the supervisor
  const bool journal_;
  const Write write_;
};

std::unique_ptr<spdlog::formatter> MakeFormatter(absl::string_view process,
                                                 LogFormat format,
                                                 bool journal) {
  if (format != LogFormat::kText) {
    return std::make_unique<PartsFormatter>(
        process, journal, format == LogFormat::kJson ? &ToJson : &ToLogfmt);
  }
  auto formatter = std::make_unique<spdlog::pattern_formatter>(
      spdlog::pattern_time_type::utc);
  formatter->add_flag<SyslogPriority>('*')
      .add_flag<ShortLevel>('~')
      .add_flag<EscapedText>('&')
      .set_pattern(Pattern(process, journal));
  return formatter;
}

}  // namespace

bool IsJournal(const char* journal_stream, int fd) {
  struct stat info;
  if (journal_stream == nullptr || ::fstat(fd, &info) != 0) return false;
  return absl::StrCat(info.st_dev, ":", info.st_ino) == journal_stream;
}

void SetUpLogging(absl::string_view process, absl::string_view level,
                  LogFormat format) {
  const bool journal = IsJournal(std::getenv("JOURNAL_STREAM"), STDERR_FILENO);
  auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  sink->set_formatter(MakeFormatter(process, format, journal));
  auto logger = std::make_shared<spdlog::logger>("", std::move(sink));
  // Lines are few and each may be the last one before a crash.
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
  SetLogLevel(level);
  current_format.store(format);
}

LogFormat CurrentLogFormat() { return current_format.load(); }

void SetLogLevel(absl::string_view level) {
  static constexpr std::pair<absl::string_view, spdlog::level::level_enum>
      kLevels[] = {{"trace", spdlog::level::trace},
                   {"debug", spdlog::level::debug},
                   {"warn", spdlog::level::warn},
                   {"error", spdlog::level::err}};
  spdlog::level::level_enum chosen = spdlog::level::info;
  for (const auto& [name, value] : kLevels) {
    if (name == level) chosen = value;
  }
  spdlog::set_level(chosen);
}

}  // namespace optstate::observe
