#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/chrome_trace.h"
#include "client/ctl/command.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/progress_text.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

constexpr char kStdout[] = "-";

struct Asked {
  std::string job;
  uint32_t steps = 20;
  std::string file = kStdout;
};

// Opens what the trace is written to; a file that is there is never written
// over.
absl::StatusOr<UniqueFd> Open(const std::string& file) {
  if (file == kStdout) {
    if (::isatty(STDOUT_FILENO) != 0) {
      return absl::InvalidArgumentError(
          "the trace would go to a terminal: redirect it, or name a file with "
          "-o");
    }
    UniqueFd out(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0));
    if (!out.ok()) return OsError(errno, "stdout");
    return out;
  }
  if (ParseOutputFormat(file).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "-o names the file of a trace, which has one format; for a file of "
        "that name: -o ./",
        file));
  }
  UniqueFd out(
      ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (out.ok()) return out;
  if (errno == EEXIST) {
    return absl::AlreadyExistsError(
        absl::StrCat(file, " is there already, and is not written over"));
  }
  return OsError(errno, absl::StrCat("create ", file));
}

// Returns whether somebody reads what is written, and may stop to read: a
// pager does so after one screen.
bool HasReader(int fd) {
  struct stat info;
  return ::fstat(fd, &info) == 0 &&
         (S_ISFIFO(info.st_mode) || S_ISSOCK(info.st_mode));
}

// Writes a trace, and says on stderr how far it is. It is written as it comes;
// but to a reader when it is over, because the daemon and the engine would wait
// for the reader too, and end the trace before long.
class TraceOutput {
 public:
  TraceOutput(const Asked& asked, UniqueFd fd)
      : asked_(asked),
        fd_(std::move(fd)),
        has_reader_(HasReader(fd_.get())),
        trace_(asked.job),
        line_(/*is_silent=*/false, STDERR_FILENO) {}

  bool has_begun() const { return has_begun_; }
  const ChromeTrace& trace() const { return trace_; }

  absl::Status Take(const v1::TraceChunk& chunk) {
    OPTSTATE_RETURN_IF_ERROR(Begin());
    OPTSTATE_ASSIGN_OR_RETURN(const std::string text, trace_.Add(chunk));
    OPTSTATE_RETURN_IF_ERROR(Append(text));
    // A rate counts from the first span: the wait for a step is none of it.
    const absl::Time now = absl::Now();
    if (trace_.spans() == 0) shows_since_ = now;
    // A stderr that is closed takes nothing from the trace.
    line_.Show("", trace_.done()
                       ? ""
                       : TraceProgressText(asked_.job, trace_, asked_.steps,
                                           now - shows_since_));
    return absl::OkStatus();
  }
  absl::Status Begin() {
    if (std::exchange(has_begun_, true)) return absl::OkStatus();
    return Append(trace_.Begin());
  }
  // Ends what was begun, so that it can be read whatever has happened.
  absl::Status End(absl::string_view said) {
    absl::Status ended = has_begun_ ? Append(trace_.End()) : absl::OkStatus();
    if (ended.ok()) ended = WriteOut(held_);
    line_.End(said).IgnoreError();  // as in Take
    return ended;
  }

 private:
  absl::Status Append(absl::string_view text) {
    if (!has_reader_) return WriteOut(text);
    absl::StrAppend(&held_, text);
    return absl::OkStatus();
  }
  absl::Status WriteOut(absl::string_view text) const {
    while (!text.empty()) {
      const ssize_t count = ::write(fd_.get(), text.data(), text.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        return Annotate(
            absl::InternalError(OsError(errno, "write").message()),
            asked_.file == kStdout ? "stdout: cannot write" : asked_.file);
      }
      text.remove_prefix(static_cast<size_t>(count));
    }
    return absl::OkStatus();
  }

  const Asked& asked_;
  const UniqueFd fd_;
  const bool has_reader_;
  std::string held_;  // for the reader
  ChromeTrace trace_;
  ProgressLine line_;
  absl::Time shows_since_ = absl::Now();
  bool has_begun_ = false;
};

// Returns what is said at the end of a trace that came to its end.
std::string ResultText(const Asked& asked, const ChromeTrace& trace) {
  std::string text =
      absl::StrCat("traced job ", asked.job, ": ", trace.steps(), " of ",
                   asked.steps, " steps, ", trace.spans(), " spans\n");
  if (trace.steps() < asked.steps) {
    absl::StrAppend(&text,
                    "the job took no further step for a minute, or its engine "
                    "was not given more time\n");
  }
  if (trace.steps() != 0) {
    absl::StrAppend(&text,
                    "open it in https://ui.perfetto.dev or chrome://tracing\n");
  }
  return text;
}

std::string LossText(const ChromeTrace& trace) {
  if (trace.lost_spans() == 0) return "";
  return absl::StrCat(trace.lost_spans(),
                      " spans are lost: they came faster than they were sent, "
                      "and the trace has gaps\n");
}

absl::Status Trace(const Context& context, const Asked& asked,
                   TraceOutput* output) {
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  v1::TraceJobRequest request;
  request.set_name(asked.job);
  request.set_steps(asked.steps);
  absl::Status traced = client->TraceJob(
      request, interrupt.fd(),
      [output](const v1::TraceChunk& chunk) { return output->Take(chunk); });
  const ChromeTrace& trace = output->trace();
  if (traced.ok() && !trace.done()) {
    traced =
        absl::UnavailableError("the daemon has ended the trace before its end");
  }
  // One that is interrupted early can be read too. What cannot be begun cannot
  // be ended either, which is told below.
  if (absl::IsCancelled(traced)) output->Begin().IgnoreError();
  OPTSTATE_RETURN_IF_ERROR(output->End(absl::StrCat(
      traced.ok() ? ResultText(asked, trace) : "", LossText(trace))));
  OPTSTATE_RETURN_IF_ERROR(traced);
  if (trace.steps() > 0) return absl::OkStatus();
  return absl::UnknownError(absl::StrCat(
      "job ", asked.job, " has ended no step: the trace shows none"));
}

absl::Status Run(const Context& context, const Asked& asked) {
  OPTSTATE_ASSIGN_OR_RETURN(UniqueFd fd, Open(asked.file));
  TraceOutput output(asked, std::move(fd));
  absl::Status traced = Trace(context, asked, &output);
  if (!output.has_begun() && asked.file != kStdout) {
    (void)::unlink(asked.file.c_str());
  }
  return traced;
}

}  // namespace

void AddTraceCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "trace",
      "Writes what a job's engine does in its next steps, and when, for "
      "ui.perfetto.dev or chrome://tracing: ranks' pushes, phases, workers, "
      "devices and disks. Training goes on, with the same results. --timeout "
      "is for the daemon's sign of life, not for the whole; Ctrl-C ends it, "
      "and what was written can be read");
  auto asked = std::make_shared<Asked>();
  command->add_option("name", asked->job, "The job's name")->required();
  command->add_option("--steps", asked->steps, "How many, 1 to 1000")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command
      ->add_option("-o,--output", asked->file,
                   "Where to; never written over. Default: stdout")
      ->type_name("FILE.json");
  command->callback([&context, asked] {
    context.run = [&context, asked]() -> absl::Status {
      if (context.format != OutputFormat::kTable) {
        return absl::InvalidArgumentError(
            "a trace has one format; -o behind `trace` names its file");
      }
      return Run(context, *asked);
    };
  });
}

}  // namespace optstate::ctl
