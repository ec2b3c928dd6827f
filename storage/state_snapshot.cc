#include "storage/state_snapshot.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/state_folder.h"

namespace optstate::storage {
namespace {

// The bound of repeated reads while an engine publishes at the same time: a
// copy is no instant, and its current record may be one that was half
// overwritten meanwhile. An engine that is stopped or dead in between leaves
// the record that is current alone, so that the next read succeeds; only damage
// is there each time.
constexpr int kReadsMax = 100;

absl::StatusOr<std::unique_ptr<ControlFile>> ReadControlOnce(
    const std::string& path, uint64_t incarnation) {
  auto control = std::make_unique<ControlFile>();
  char bytes[sizeof(ControlFile)];
  std::ifstream file(path, std::ios::binary);
  if (!file.read(bytes, sizeof(bytes))) {
    return absl::DataLossError(
        absl::StrCat("is missing or has less than ", sizeof(bytes), " bytes"));
  }
  std::memcpy(static_cast<void*>(control.get()), bytes, sizeof(bytes));
  OPTSTATE_RETURN_IF_ERROR(CheckCurrentRecord(*control, incarnation));
  return control;
}

absl::StatusOr<std::unique_ptr<ControlFile>> ReadControl(
    const std::string& path, uint64_t incarnation) {
  absl::StatusOr<std::unique_ptr<ControlFile>> control;
  for (int reads = 0; reads < kReadsMax; ++reads) {
    control = ReadControlOnce(path, incarnation);
    if (control.ok()) break;
    std::this_thread::yield();
  }
  return control;
}

}  // namespace

absl::StatusOr<StateSnapshot> ReadStateSnapshot(const std::string& directory) {
  const std::string folder = directory + kStateFolder;
  std::error_code error;
  if (!std::filesystem::exists(folder, error) && !error) {
    return absl::NotFoundError(absl::StrCat("no job in ", directory));
  }
  const std::string description = absl::StrCat(folder, "/", kDescriptionFile);
  absl::StatusOr<CheckedFile> file = ReadCheckedFile(description);
  if (absl::IsNotFound(file.status())) {
    return absl::DataLossError(absl::StrCat(description, " is missing"));
  }
  OPTSTATE_RETURN_IF_ERROR(file.status());
  StateSnapshot snapshot;
  snapshot.description = *std::move(file);
  const std::string path = absl::StrCat(folder, "/", kControlFileName);
  const auto control = ReadControl(path, snapshot.description.incarnation);
  OPTSTATE_RETURN_IF_ERROR(Annotate(control.status(), path));
  snapshot.record = CurrentRecord(**control);
  snapshot.created_at_ns = (*control)->created_at_ns;
  snapshot.steps_recovered = (*control)->steps_recovered;
  snapshot.runs_rolled_back = (*control)->runs_rolled_back;
  return snapshot;
}

}  // namespace optstate::storage
