// The small files of a job's folder on a disk, and of the disk's directory.
// Input: a byte that says which file, its text. All of them are read.

#include <array>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/session/durability/disk_claim.h"
#include "server/session/durability/verify_note.h"
#include "storage/block_device/device.h"
#include "storage/block_device/extents.h"
#include "storage/disk_folder.h"
#include "storage/format/sealed_text.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/scratch_folder.h"

namespace optstate::fuzz {
namespace {

constexpr std::array<const char*, 7> kFiles = {
    "jobs/a/identity", "jobs/a/memory",   "jobs/a/owner", "jobs/a/extent",
    "jobs/a/extent.1", "jobs/a/verified", "device"};

constexpr char kDeviceId[] = "0123456789abcdef0123456789abcdef";

std::string Input(uint8_t file, const std::string& text) {
  return FuzzBytes(file) + text;
}

void ReadAll(const std::string& directory) {
  const std::string folder = storage::DiskFolder(directory, "a");
  (void)storage::ReadDiskOwner(folder);
  (void)session::CheckDiskOwner(folder, 1000);
  const auto identity = storage::ReadDiskIdentity(folder);
  if (identity.ok() && identity->has_value()) {
    Require((*identity)->index < (*identity)->count,
            "a folder is one of the job's");
  }
  for (const uint32_t count : {0, 1}) {
    (void)session::CheckDiskIdentities({folder}, 7, count);
  }
  (void)storage::IsDiskFolderInUse(folder, "/state", directory + "/device");
  (void)session::ReadVerifyNote(folder);
  (void)storage::ReadDeviceNote(directory);
  (void)storage::HasExtents(directory);
}

// Gives a second job a part of a device of which the first one has an extent.
void Allocate(const std::string& directory) {
  constexpr uint64_t kDeviceBytes = uint64_t{64} << 20;
  constexpr uint64_t kExtentBytes = uint64_t{1} << 20;
  const storage::Superblock device = {.device_id = kDeviceId,
                                      .directory_id = kDeviceId,
                                      .device_bytes = kDeviceBytes};
  const auto free = storage::FreeBytes(directory, device);
  Require(!free.ok() || *free <= kDeviceBytes,
          "no more is free than a device has");
  const auto extent = storage::AllocateExtent(
      directory, storage::DiskFolder(directory, "b"), device, kExtentBytes);
  if (!extent.ok()) return;
  Require(extent->bytes == kExtentBytes && extent->begin_bytes < kDeviceBytes &&
              kExtentBytes <= kDeviceBytes - extent->begin_bytes,
          "an extent lies on its device");
  for (const uint32_t arrangement : {0, 1}) {
    const auto other = storage::ReadDiskExtent(
        storage::DiskFolder(directory, "a"), arrangement);
    if (!other.ok() || !other->has_value()) continue;
    if ((*other)->device_id != kDeviceId) continue;
    const io::Extent& taken = (*other)->extent;
    Require(taken.begin_bytes >= extent->begin_bytes + extent->bytes ||
                extent->begin_bytes >= taken.begin_bytes + taken.bytes,
            "two jobs have no part of a device in common");
  }
}

}  // namespace

std::vector<std::string> Seeds() {
  return {
      Input(0, "incarnation 00000000deadbeef\ndirectory 1 of 2\n"),
      Input(1, absl::StrCat(storage::ReadBootId().value_or("boot\n"),
                            "/dev/shm/optstate/jobs/a\n")),
      Input(0, storage::SealText(
                   "incarnation 00000000deadbeef\ndirectory 1 of 2\n")),
      Input(2, "1000\n"),
      Input(2, storage::SealText("1000\n")),
      Input(3, absl::StrCat("device ", kDeviceId,
                            "\nbegin 1048576\nbytes 4194304\n")),
      Input(3, storage::SealText(absl::StrCat(
                   "device ", kDeviceId, "\nbegin 1048576\nbytes 4194304\n"))),
      Input(4, absl::StrCat("device ", kDeviceId,
                            "\nbegin 9223372036853727232\nbytes 4096\n")),
      Input(5,
            "incarnation 0000000000000007\ncounted_from 1700000000000000000"
            "\nverified 1\ndamaged 0\n"),
      Input(6, absl::StrCat("device ", kDeviceId, "\ndirectory ", kDeviceId,
                            "\n"))};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate::fuzz;
  static const ScratchFolder* const folder = [] {
    auto* const made = new ScratchFolder();
    std::filesystem::create_directories(made->path() + "/jobs/a");
    std::filesystem::create_directories(made->path() + "/jobs/b");
    return made;
  }();
  FuzzInput input(data, size);
  const char* const name = kFiles[input.Take<uint8_t>() % kFiles.size()];
  folder->Write(name, input.rest());
  ReadAll(folder->path());
  Allocate(folder->path());
  std::error_code ignored;
  std::filesystem::remove(folder->path() + "/" + name, ignored);
  std::filesystem::remove(folder->path() + "/jobs/b/extent", ignored);
  return 0;
}
