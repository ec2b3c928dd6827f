// One rank of a job that goes through a scenario from the committed step on;
// see crash_rank.h.

#include <sys/prctl.h>

#include <csignal>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "proto/types/status_macros.h"
#include "tests/crash/crash_script.h"
#include "tests/crash/parameter_hash.h"
#include "tests/crash/shared_page.h"

namespace optstate::crash {
namespace {

// Opens the session. A rank that takes another's place starts when a daemon,
// and the job, is there.
absl::StatusOr<std::unique_ptr<client::Session>> Open(
    const client::SessionOptions& options) {
  const absl::Time deadline = absl::Now() + options.connect_timeout;
  while (true) {
    auto session = client::Session::Open(options);
    if (!absl::IsUnavailable(session.status()) || absl::Now() > deadline) {
      return session;
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
}

absl::StatusOr<uint64_t> Run(const client::SessionOptions& options,
                             const CrashScript& script, RankBoard* board) {
  OPTSTATE_ASSIGN_OR_RETURN(const auto session, Open(options));
  if (session->info().phase == client::JobPhase::kLoading) {
    OPTSTATE_RETURN_IF_ERROR(script.Load(*session));
  }
  OPTSTATE_RETURN_IF_ERROR(
      script.LoadAfter(*session, session->committed_step(), board));
  for (uint64_t step = session->committed_step() + 1;
       step <= script.scenario().steps; ++step) {
    OPTSTATE_RETURN_IF_ERROR(
        script.RunStep(*session, step, options.rank, board));
  }
  board->phase = RankPhase::kOther;
  return HashOfParameters(*session);
}

int Main(char** arguments) {
  // The process ends with the test, however the test ends.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto scenario = Scenario::FromWord(arguments[4]);
  uint32_t rank = 0;
  if (!scenario.ok() || !absl::SimpleAtoi(arguments[3], &rank)) return 2;
  auto page = SharedPage::Map(arguments[5], SharedPage::Access::kCreate);
  if (!page.ok()) return 2;
  const CrashScript script(*scenario);
  client::SessionOptions options =
      script.Options(arguments[1], arguments[2], rank);
  options.connect_timeout = absl::Seconds(60);
  const auto hash = Run(options, script, static_cast<RankBoard*>(page->data()));
  if (!hash.ok()) {
    std::cout << hash.status().ToString() << std::endl;
    return 1;
  }
  std::cout << *hash << std::endl;
  return 0;
}

}  // namespace
}  // namespace optstate::crash

int main(int argc, char** argv) {
  return argc == 6 ? optstate::crash::Main(argv) : 2;
}
