#include "server/engine/engine.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/prctl.h>

#include <csignal>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/types/unique_fd.h"
#include "server/engine/connection_server.h"
#include "server/engine/control_channel.h"
#include "server/engine/engine_service.h"
#include "server/engine/job_lock.h"
#include "server/session/job.h"
#include "spdlog/spdlog.h"

namespace optstate {
namespace {

// For a predecessor that is dying: unmapping its memory may take a while.
constexpr absl::Duration kLockPatience = absl::Seconds(30);

void PrepareProcess(const std::string& job) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  // The kernel keeps 15 characters: "os:JOB" tells jobs apart in top.
  ::prctl(PR_SET_NAME, absl::StrCat("os:", job).c_str(), 0, 0, 0);
}

// Chunks of a MiB come and go with every message of gRPC. By default glibc
// would hand their pages back and fault them in again each time, which costs
// more than copying them.
void KeepFreedMemory() {
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 64 << 20);
}

UniqueFd TakeFd(int fd) {
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return UniqueFd(fd);
}

int Fail(const absl::Status& status) {
  spdlog::error("engine cannot start: {}", status.ToString());
  return 1;
}

}  // namespace

int RunEngine(const EngineOptions& options) {
  ControlChannel control(TakeFd(options.control_fd));
  UniqueFd grpc_socket = TakeFd(options.grpc_fd);
  const v1::EngineConfig& config = options.config;
  PrepareProcess(config.job());
  KeepFreedMemory();

  auto lock = LockJob(config.job_dir(), kLockPatience);
  if (!lock.ok()) return Fail(lock.status());
  absl::StatusOr<std::unique_ptr<Job>> job =
      Job::Open({.name = config.job(),
                 .uid = config.uid(),
                 .directory = config.job_dir(),
                 .config = config.daemon(),
                 .kept = {}});
  if (!job.ok()) {
    spdlog::error("job cannot be opened: job={} error=\"{}\"", config.job(),
                  job.status().ToString());
  }
  Job* const opened = job.ok() ? job->get() : nullptr;

  auto service = EngineService::Start(std::move(grpc_socket), config, opened,
                                      job.status());
  if (!service.ok()) return Fail(service.status());
  auto server = ConnectionServer::Start(config, &control, opened, job.status());
  if (!server.ok()) return Fail(server.status());
  spdlog::info("engine ready: job={} restarts={}", config.job(),
               config.restarts());
  (*server)->Run();
  spdlog::info("engine ends: job={}", config.job());
  return 0;
}

}  // namespace optstate
