#include "server/config/sleep_directory.h"

namespace optstate::config {

std::string SleepDirectoryOf(const v1::DaemonConfig& config) {
  if (!config.sleep_directory().empty()) return config.sleep_directory();
  if (config.nvme().directories().empty()) return "";
  return config.nvme().directories(0) + "/asleep";
}

}  // namespace optstate::config
