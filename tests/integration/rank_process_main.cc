// One rank of a job, steered line by line; see rank_process.h.

#include <sys/prctl.h>

#include <csignal>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/client.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"

namespace optstate {
namespace {

void Answer(const absl::StatusOr<std::string>& answer) {
  if (answer.ok()) {
    std::cout << "ok " << *answer << std::endl;
    return;
  }
  std::cout << answer.status().raw_code() << " "
            << absl::StrReplaceAll(answer.status().message(), {{"\n", " "}})
            << std::endl;
}

absl::StatusOr<std::string> Commit(client::Session& session,
                                   const StepScript& script, uint64_t step) {
  OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome outcome,
                            session.Commit(script.Make(step).commit));
  return absl::StrCat(outcome.step, " ", outcome.applied);
}

absl::StatusOr<std::string> Push(client::Session& session,
                                 const StepScript& script, uint64_t step) {
  OPTSTATE_RETURN_IF_ERROR(StepScript::Push(session, script.Make(step)));
  OPTSTATE_RETURN_IF_ERROR(session.Flush());
  return std::string();
}

absl::StatusOr<std::string> Obey(client::Session& session,
                                 const StepScript& script,
                                 const std::string& line) {
  const std::pair<std::string, std::string> words =
      absl::StrSplit(line, absl::MaxSplits(' ', 1));
  uint64_t step = 0;
  static_cast<void>(absl::SimpleAtoi(words.second, &step));
  if (words.first == "load") {
    OPTSTATE_RETURN_IF_ERROR(script.Load(session));
    return std::string();
  }
  if (words.first == "push") return Push(session, script, step);
  if (words.first == "commit") return Commit(session, script, step);
  if (words.first == "step") {
    OPTSTATE_RETURN_IF_ERROR(Push(session, script, step).status());
    return Commit(session, script, step);
  }
  if (words.first == "committed") return absl::StrCat(session.committed_step());
  if (words.first == "fetch") {
    OPTSTATE_RETURN_IF_ERROR(Snapshot(session).status());
    return std::string();
  }
  if (words.first == "info") return session.info().endpoint;
  return absl::InvalidArgumentError(line);
}

int Run(char** arguments) {
  // The process ends with the test, however the test ends.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  client::SessionOptions options;
  options.endpoint = arguments[1];
  options.daemon_path = arguments[2];
  options.job = arguments[3];
  options.layout = MixedLayout();
  uint64_t seed = 0;
  if (!absl::SimpleAtoi(arguments[4], &options.rank) ||
      !absl::SimpleAtoi(arguments[5], &options.world_size) ||
      !absl::SimpleAtoi(arguments[6], &seed)) {
    return 2;
  }
  auto session = client::Session::Open(std::move(options));
  if (!session.ok()) {
    Answer(session.status());
    return 1;
  }
  Answer(std::string("open"));
  const StepScript script((*session)->layout(), seed);
  for (std::string line; std::getline(std::cin, line);) {
    Answer(Obey(**session, script, line));
  }
  return 0;
}

}  // namespace
}  // namespace optstate

int main(int argc, char** argv) { return argc == 7 ? optstate::Run(argv) : 2; }
