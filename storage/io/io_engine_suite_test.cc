// Runs the suite over every engine.

#include "storage/io/io_engine_suite.h"

#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "storage/io/blocking_io_engine.h"
#include "storage/io/disk_share.h"
#include "storage/io/io_uring_io_engine.h"
#include "storage/io/metered_io_engine.h"
#include "storage/io/shared_io_engine.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"

namespace optstate::io {
namespace {

// A folder on the disk of the test's temporary files.
class FolderWorld : public IoEngineWorld {
 public:
  FolderWorld() : folder_(testing::TempDir() + "/io_engine_XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
  }
  ~FolderWorld() override { std::filesystem::remove_all(folder_); }

  const std::string& folder() const override { return folder_; }
  uint64_t TooManyBytes() const override {
    struct statvfs info;
    if (::statvfs(folder_.c_str(), &info) != 0) std::abort();
    // Other processes may free some while the test runs.
    return 2 * uint64_t{info.f_blocks} * info.f_frsize;
  }
  void Truncate(const std::string& path, uint64_t bytes) override {
    std::filesystem::resize_file(path, bytes);
  }

 protected:
  static IoEngineOptions OptionsOf(const Setup& setup) {
    IoEngineOptions options;
    options.queue_depth = setup.queue_depth;
    options.hook = setup.hook;
    options.lock_wait = absl::Milliseconds(20);
    options.log = [](const std::string& text) { std::cerr << text << "\n"; };
    return options;
  }

 private:
  std::string folder_;
};

class BlockingWorld final : public FolderWorld {
 public:
  absl::StatusOr<std::unique_ptr<IoEngine>> Make(const Setup& setup) override {
    return MakeBlockingIoEngine(OptionsOf(setup));
  }
};

// An engine behind the one that counts.
class MeteredWorld final : public FolderWorld {
 public:
  absl::StatusOr<std::unique_ptr<IoEngine>> Make(const Setup& setup) override {
    absl::StatusOr<std::unique_ptr<IoEngine>> engine =
        MakeBlockingIoEngine(OptionsOf(setup));
    if (!engine.ok()) return engine.status();
    return MeterIoEngine(*std::move(engine), &done_bytes_);
  }

 private:
  std::atomic<uint64_t> done_bytes_ = 0;
};

// An engine behind the one that shares, with another process that always has
// requests.
class SharedWorld final : public FolderWorld {
 public:
  absl::StatusOr<std::unique_ptr<IoEngine>> Make(const Setup& setup) override {
    absl::StatusOr<std::unique_ptr<IoEngine>> engine =
        MakeBlockingIoEngine(OptionsOf(setup));
    if (!engine.ok()) return engine.status();
    auto share = DiskShare::Open(shares_.folder() + "/shares", 1, {});
    if (!share.ok()) return share.status();
    if (other_ == nullptr) {
      auto other = DiskShare::Open(shares_.folder() + "/shares", 1, {});
      if (!other.ok()) return other.status();
      other_ = *std::move(other);
      // Far in the future.
      other_->NoteActive(int64_t{1} << 62);
    }
    return ShareIoEngine(*std::move(engine), *std::move(share));
  }

 private:
  class Folder : public FolderWorld {
   public:
    absl::StatusOr<std::unique_ptr<IoEngine>> Make(const Setup&) override {
      return absl::UnimplementedError("a folder alone");
    }
  };

  Folder shares_;
  std::unique_ptr<DiskShare> other_;
};

template <bool kSubmissionThread>
class IoUringWorld final : public FolderWorld {
 public:
  absl::StatusOr<std::unique_ptr<IoEngine>> Make(const Setup& setup) override {
    IoEngineOptions options = OptionsOf(setup);
    options.submission_thread = kSubmissionThread;
    return MakeIoUringIoEngine(options);
  }
};

// With kReordered, calls end in any order.
template <bool kReordered>
class SimulatedWorld final : public IoEngineWorld {
 public:
  SimulatedWorld() : disk_(Options()) {}
  absl::StatusOr<std::unique_ptr<IoEngine>> Make(const Setup& setup) override {
    return MakeSimulatedIoEngine(&disk_, setup.queue_depth, setup.hook);
  }
  const std::string& folder() const override { return folder_; }
  uint64_t TooManyBytes() const override { return kCapacityBytes; }
  void Truncate(const std::string& path, uint64_t bytes) override {
    disk_.Truncate(path, bytes);
  }

 private:
  static constexpr uint64_t kCapacityBytes = uint64_t{1} << 30;
  static SimulatedDiskOptions Options() {
    SimulatedDiskOptions options;
    options.capacity_bytes = kCapacityBytes;
    if (kReordered) options.latency_us_max = 500;
    return options;
  }

  const std::string folder_ = "/disk";
  SimulatedDisk disk_;
};

template <typename World>
std::unique_ptr<IoEngineWorld> MakeWorld() {
  return std::make_unique<World>();
}

INSTANTIATE_TEST_SUITE_P(
    Engines, IoEngineSuite,
    testing::Values(
        IoEngineWorldParam{"Blocking", &MakeWorld<BlockingWorld>},
        IoEngineWorldParam{"Metered", &MakeWorld<MeteredWorld>},
        IoEngineWorldParam{"Shared", &MakeWorld<SharedWorld>},
        IoEngineWorldParam{"IoUring", &MakeWorld<IoUringWorld<false>>},
        IoEngineWorldParam{"IoUringSubmissionThread",
                           &MakeWorld<IoUringWorld<true>>},
        IoEngineWorldParam{"Simulated", &MakeWorld<SimulatedWorld<false>>},
        IoEngineWorldParam{"SimulatedReordered",
                           &MakeWorld<SimulatedWorld<true>>}),
    IoEngineWorldName);

}  // namespace
}  // namespace optstate::io
