#include "client/ctl/optctl_fixture.h"

#include <sys/wait.h>

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "optstate/v1/admin.pb.h"
#include "tests/faults/process_state.h"

namespace optstate::ctl {

using client::Session;

Ran RunCommand(const std::string& command) {
  Ran ran;
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return ran;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    ran.output.append(buffer, n);
  }
  const int status = ::pclose(pipe);
  if (WIFEXITED(status)) ran.exit_code = WEXITSTATUS(status);
  return ran;
}

Ran RunBinary(const std::string& arguments, const std::string& redirections) {
  return RunCommand(
      absl::StrCat("client/ctl/optctl ", arguments, " ", redirections));
}

void OptctlTest::SetUp() {
  auto daemon = TestDaemon::Start();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
}

std::unique_ptr<Session> OptctlTest::Train(
    const std::string& job, const client::StorageOptions& storage) {
  client::SessionOptions options;
  options.endpoint = daemon_->shm_endpoint();
  options.job = job;
  options.storage = storage;
  options.layout.groups.resize(1);
  options.layout.parameters = {{"weight", {2, 3}, 6}, {"bias", {3}, 3}};
  auto session = Session::Open(options);
  EXPECT_TRUE(session.ok()) << session.status();
  if (!session.ok()) return nullptr;
  const std::vector<float> ones(6, 1.0f);
  const auto bytes =
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(ones.data()), 24);
  EXPECT_TRUE((*session)->BeginLoad().ok());
  for (uint32_t p = 0; p < 2; ++p) {
    EXPECT_TRUE((*session)
                    ->Load(client::StateArray::kMaster, p, DType::kFloat32,
                           bytes.first(p == 0 ? 24 : 12))
                    .ok());
  }
  EXPECT_TRUE((*session)->FinishLoad().ok());
  const auto outcome = Step(**session, 1);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  return *std::move(session);
}

absl::StatusOr<client::Outcome> OptctlTest::Step(Session& session,
                                                 uint64_t step) {
  const std::vector<float> ones(6, 1.0f);
  const void* const gradients[] = {ones.data(), ones.data()};
  const absl::Status pushed = session.PushGradients(step, 0, {0, 1}, gradients);
  if (!pushed.ok()) return pushed;
  client::CommitOptions commit;
  commit.step = step;
  commit.groups.resize(1);
  return session.Commit(commit);
}

std::string OptctlTest::AtDaemon(const std::string& arguments) const {
  return absl::StrCat("--endpoint ", daemon_->shm_endpoint(), " ", arguments);
}

Ran OptctlTest::Optctl(const std::string& arguments) const {
  return RunBinary(AtDaemon(arguments));
}

Ran OptctlTest::OptctlToFull(const std::string& arguments) const {
  return RunBinary(AtDaemon(arguments), "2>&1 >/dev/full");
}

Process OptctlTest::StopEngine(const std::string& job) const {
  const auto described = daemon_->GetJob(job);
  EXPECT_TRUE(described.ok()) << described.status();
  Process engine(static_cast<pid_t>(described->engine_pid()));
  engine.Signal(SIGSTOP);
  while (!faults::IsStopped(engine.pid())) std::this_thread::yield();
  return engine;
}

int64_t OptctlTest::AwaitFailedEngine(const std::string& name, int64_t last) {
  while (true) {
    const auto job = daemon_->GetJob(name);
    if (job.ok() && job->phase() == v1::JOB_PHASE_FAILED &&
        job->engine_pid() != 0 && job->engine_pid() != last) {
      return job->engine_pid();
    }
    std::this_thread::yield();
  }
}

}  // namespace optstate::ctl
