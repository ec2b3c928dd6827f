#include "server/start_report.h"

#include <spdlog/spdlog.h>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/cpu/targets.h"
#include "proto/types/version.h"
#include "server/os/fd_limit.h"
#include "server/scheduler/workers/available_cores.h"

namespace optstate::server {
namespace {

// Logs which groups have a role at unix sockets, where users need one of them.
void LogGroups(const v1::AccessSettings& access) {
  if (access.trainer_groups().empty() && access.viewer_groups().empty()) return;
  const auto names = [](const auto& groups) {
    return groups.empty() ? std::string("none") : absl::StrJoin(groups, ", ");
  };
  spdlog::info(
      "unix sockets: groups of operators: {}; of trainers: {}; of viewers: {}; "
      "root and the daemon's user are operators, other users have no role",
      names(access.operator_groups()), names(access.trainer_groups()),
      names(access.viewer_groups()));
}

}  // namespace

uint32_t WorkersOf(const v1::DaemonConfig& config) {
  return config.engine().workers() != 0
             ? config.engine().workers()
             : static_cast<uint32_t>(scheduler::AvailableCores());
}

admin::ServerInfo DescribeServer(const v1::DaemonConfig& config,
                                 const std::string& pages,
                                 const accept::Listeners& listeners) {
  admin::ServerInfo info;
  info.started_at = absl::Now();
  info.state_dir = config.state_dir();
  info.socket = config.socket();
  for (size_t i = 1; i < listeners.size(); ++i) {
    info.listen.push_back(listeners[i]->name());
  }
  info.huge_pages = pages;
  info.instruction_set = kernels::cpu::TargetName(kernels::cpu::BestTarget());
  info.workers = WorkersOf(config);
  info.config = config;
  return info;
}

void LogStart(const admin::ServerInfo& info) {
  spdlog::info("optstated {} starts", std::string(kVersion));
  spdlog::info("state directory {}: {}", info.state_dir, info.huge_pages);
  spdlog::info("listening on unix:{}{}{}", info.socket,
               info.listen.empty() ? "" : ", ",
               absl::StrJoin(info.listen, ", "));
  LogGroups(info.config.access());
  for (const std::string& address : info.listen) {
    if (absl::StartsWith(address, "unix:")) continue;
    if (info.config.insecure_tcp()) {
      spdlog::warn(
          "{}: TCP without TLS has no users: every local user may use and "
          "delete every job (--insecure)",
          address);
    } else {
      spdlog::info("{}: TLS, clients say who they are by {}", address,
                   info.config.tls().client_ca_file().empty() ? "tokens"
                                                              : "certificates");
    }
  }
  spdlog::info("{} workers per engine, instruction set {}", info.workers,
               info.instruction_set);
}

void WarnOfFewFds(const v1::DaemonConfig& config) {
  const v1::Limits& limits = config.limits();
  // A session over TLS leaves a socket and an end of a socket pair here.
  const uint64_t of_session = config.tls().certificate_file().empty() ? 1 : 2;
  const uint64_t needed =
      3 * uint64_t{limits.jobs_max()} + of_session * limits.sessions_max();
  const uint64_t limit = os::FdLimit();
  if (limit >= needed) return;
  spdlog::warn(
      "the limit of open files is {}, and limits.jobs_max {} and "
      "limits.sessions_max {} may need {}: raise it (ulimit -n, LimitNOFILE=), "
      "or lower them; new jobs and sessions are refused when none is left",
      limit, limits.jobs_max(), limits.sessions_max(), needed);
}

}  // namespace optstate::server
