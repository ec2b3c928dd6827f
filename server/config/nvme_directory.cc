#include "server/config/nvme_directory.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace optstate::config {

absl::StatusOr<v1::NvmeDirectory> ParseNvmeDirectory(absl::string_view text) {
  const size_t comma = text.find(',');
  v1::NvmeDirectory directory;
  directory.set_path(std::string(text.substr(0, comma)));
  absl::string_view device;
  if (comma != absl::string_view::npos) {
    device = text.substr(comma + 1);
    if (!absl::ConsumePrefix(&device, "device=") || device.empty() ||
        absl::StrContains(device, ',')) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", text,
          "\": must be DIR or DIR,device=DEVICE; a directory with a comma in "
          "its name can be given in the configuration file"));
    }
  }
  if (directory.path().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\": names no directory"));
  }
  directory.set_device(std::string(device));
  return directory;
}

std::string DeviceOf(const v1::NvmeSettings& nvme,
                     absl::string_view directory) {
  for (const v1::NvmeDirectory& settings : nvme.directory_settings()) {
    if (settings.path() == directory) return settings.device();
  }
  return "";
}

std::vector<std::string> DirectoryTexts(const v1::NvmeSettings& nvme) {
  std::vector<std::string> texts;
  for (const std::string& directory : nvme.directories()) {
    const std::string device = DeviceOf(nvme, directory);
    texts.push_back(device.empty()
                        ? directory
                        : absl::StrCat(directory, ",device=", device));
  }
  return texts;
}

}  // namespace optstate::config
