#ifndef OPTSTATE_SERVER_ADMIN_SERVER_INFO_H_
#define OPTSTATE_SERVER_ADMIN_SERVER_INFO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "optstate/v1/config.pb.h"

namespace optstate::admin {

// The constant part of GetStatus's answer about the daemon.
struct ServerInfo {
  absl::Time started_at;
  std::string state_dir;
  std::string socket;
  std::vector<std::string> listen;
  std::string huge_pages;
  std::string instruction_set;
  uint32_t workers = 0;
  v1::DaemonConfig config;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_SERVER_INFO_H_
