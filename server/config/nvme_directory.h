#ifndef OPTSTATE_SERVER_CONFIG_NVME_DIRECTORY_H_
#define OPTSTATE_SERVER_CONFIG_NVME_DIRECTORY_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/config.pb.h"

namespace optstate::config {

// Parses "DIR" or "DIR,device=DEVICE", as the command line has it.
// INVALID_ARGUMENT: the text is neither.
absl::StatusOr<v1::NvmeDirectory> ParseNvmeDirectory(absl::string_view text);

// Returns the device of one of nvme.directories; empty: it has none.
std::string DeviceOf(const v1::NvmeSettings& nvme, absl::string_view directory);

// Returns nvme.directories, each as ParseNvmeDirectory() reads it.
std::vector<std::string> DirectoryTexts(const v1::NvmeSettings& nvme);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_NVME_DIRECTORY_H_
