#include "server/engine/engine.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <sys/prctl.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/types/partition.h"
#include "proto/types/unique_fd.h"
#include "server/engine/connection_server.h"
#include "server/engine/engine_service.h"
#include "server/engine/job_lock.h"
#include "server/engine/supervisor_link.h"
#include "server/engine/supervisor_reporter.h"
#include "server/engine/work_reporter.h"
#include "server/session/job.h"
#include "server/session/recovery/gradient_keeper.h"
#include "server/session/wire_counters.h"
#include "spdlog/spdlog.h"

namespace optstate::engine {
namespace {

// Time for a dying predecessor: unmapping its memory may take a while.
constexpr absl::Duration kLockPatience = absl::Seconds(30);

void PrepareProcess(const std::string& job) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  // The kernel keeps 15 characters: "os:JOB" tells jobs apart in top.
  ::prctl(PR_SET_NAME, absl::StrCat("os:", job).c_str(), 0, 0, 0);
}

// Makes malloc keep freed memory. Chunks of a MiB come and go with every gRPC
// message. By default glibc would hand their pages back and fault them in again
// each time, which costs more than copying them.
void KeepFreedMemory() {
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 64 << 20);
}

UniqueFd TakeFd(int fd) {
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return UniqueFd(fd);
}

// Logs the failure and reports it to the supervisor, if there is one.
int Fail(const absl::Status& status, SupervisorLink* link = nullptr) {
  spdlog::error("engine cannot start: {}", status.ToString());
  v1::EngineEvent event;
  event.mutable_cannot_start()->set_reason(std::string(status.message()));
  if (link != nullptr) (void)link->Send(event);
  return 1;
}

// The supervisor's messages before the job can be opened.
struct Introduction {
  SupervisorMessage supervise;
  std::vector<session::KeptGradients> kept;
};

void AddKept(SupervisorMessage message,
             std::vector<session::KeptGradients>* kept) {
  const v1::KeptGradientsInfo& info = message.request.kept_gradients();
  if (info.rank() >= kWorldSizeMax) {
    spdlog::error("kept gradients of rank {} refused: there is none above {}",
                  info.rank(), kWorldSizeMax - 1);
    return;
  }
  std::erase_if(*kept, [&info](const session::KeptGradients& one) {
    return one.rank == info.rank();
  });
  kept->push_back({info.rank(), info.client_instance(),
                   info.gradient_offset_bytes(), std::move(message.fd)});
}

// Waits for StartJob, or the end of the link. The messages of a supervisor that
// dies before StartJob are kept for the next.
Introduction AwaitStartJob(SupervisorLink* link) {
  Introduction introduction;
  while (!link->ended()) {
    pollfd readable{link->fd(), POLLIN, 0};
    (void)::poll(&readable, 1, -1);
    while (auto message = link->Receive()) {
      if (message->request.has_supervise()) {
        introduction.supervise = *std::move(message);
      } else if (message->request.has_kept_gradients()) {
        AddKept(*std::move(message), &introduction.kept);
      } else if (message->request.has_start_job()) {
        return introduction;
      }
      // A connection before Ready was not asked for.
    }
  }
  return introduction;
}

}  // namespace

int RunEngine(const EngineOptions& options) {
  v1::EngineConfig config = options.config;
  PrepareProcess(config.job());
  KeepFreedMemory();
  auto link = SupervisorLink::Start(TakeFd(options.socket_fd),
                                    config.exit_with_supervisor());
  if (!link.ok()) return Fail(link.status());
  Introduction introduction = AwaitStartJob(link->get());
  if ((*link)->ended()) return 0;
  *config.mutable_daemon()->mutable_limits() =
      introduction.supervise.request.supervise().limits();

  auto lock = LockJob(config.job_dir(), kLockPatience);
  if (!lock.ok()) return Fail(lock.status(), link->get());
  // The last engine's gradients let the job finish the step that was
  // interrupted by that engine's death.
  std::vector<session::KeptGradients> kept = std::move(introduction.kept);
  SupervisorReporter reporter(link->get());
  reporter.Seed(kept);
  const size_t kept_count = kept.size();
  std::atomic<uint64_t> disk_bytes = 0;
  session::WireCounters wires;
  absl::StatusOr<std::unique_ptr<session::Job>> job = [&] {
    const WorkReporter working(link->get(), &disk_bytes);
    return session::Job::Open({.name = config.job(),
                               .uid = config.uid(),
                               .directory = config.job_dir(),
                               .config = config.daemon(),
                               .kept = std::move(kept),
                               .keeper = &reporter,
                               .disk_bytes = &disk_bytes,
                               .wires = &wires});
  }();
  if (!job.ok()) {
    spdlog::error("job cannot be opened: job={} error=\"{}\"", config.job(),
                  job.status().ToString());
  }
  session::Job* const opened = job.ok() ? job->get() : nullptr;

  auto service = EngineService::Start(config, opened, job.status(), &wires);
  if (!service.ok()) return Fail(service.status(), link->get());
  auto server = ConnectionServer::Start({.config = config,
                                         .link = link->get(),
                                         .reporter = &reporter,
                                         .service = service->get(),
                                         .job = opened,
                                         .failure = job.status(),
                                         .wires = &wires});
  if (!server.ok()) return Fail(server.status(), link->get());
  (*server)->TakeSupervise(std::move(introduction.supervise));
  spdlog::info("engine ready: job={} restarts={} kept_gradients={}",
               config.job(), config.restarts(), kept_count);
  (*server)->Run();
  // Ends as if killed, but not in the middle of a pass: the next engine finds
  // all that ranks have staged, and ranks reconnect by themselves. Ending a
  // session would drop its rank's part.
  const bool paused = opened != nullptr && opened->paused();
  if (opened != nullptr) {
    const WorkReporter working(link->get(), &disk_bytes);
    opened->Stop();
  }
  spdlog::info("engine ends{}: job={} step={}",
               paused ? " between two steps" : "", config.job(),
               opened == nullptr ? 0 : opened->Describe().committed_step());
  std::_Exit(0);
}

}  // namespace optstate::engine
