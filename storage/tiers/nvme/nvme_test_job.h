#ifndef OPTSTATE_STORAGE_TIERS_NVME_NVME_TEST_JOB_H_
#define OPTSTATE_STORAGE_TIERS_NVME_NVME_TEST_JOB_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "storage/arrangement.h"
#include "storage/durable_commit.h"
#include "storage/io/io_engine.h"
#include "storage/record_rewrite.h"
#include "storage/swap_sizes.h"
#include "storage/tiers/host_store.h"
#include "storage/tiers/nvme/nvme_store.h"

namespace optstate::nvme {

// The expected content of a job's records, byte by byte: its arrays, whole in
// memory.
class NvmeTestModel {
 public:
  NvmeTestModel(const Layout* layout, uint64_t sub_group_elements);

  storage::RecordView record(size_t sub_group) const {
    return store_->record(sub_group);
  }
  const SubGroupTable& sub_groups() const { return store_->sub_groups(); }
  // Takes the bytes of another model of the layout.
  void CopyFrom(const NvmeTestModel& other);

 private:
  std::vector<std::byte> parameters_, master_;
  std::array<std::vector<std::byte>, kStateArraysMax> state_;
  std::array<std::vector<float>, kStateArraysMax> scale_;
  std::unique_ptr<storage::HostStore> store_;
};

// Returns the pieces of a record that its store keeps: its arrays, and the
// parameters that are a part of their masters, or all parameters.
std::vector<absl::Span<std::byte>> KeptPieces(const Layout& layout,
                                              const storage::RecordView& record,
                                              bool holds_parameters = false);

// Memory of files that outlive the engine.
class NvmeTestMemory {
 public:
  explicit NvmeTestMemory(uint64_t bytes)
      : data_(static_cast<std::byte*>(
            std::aligned_alloc(io::kSectorBytes, RoundUp(bytes)))),
        bytes_(bytes) {
    Zero();
  }
  absl::Span<std::byte> span() const { return {data_.get(), bytes_}; }
  void Zero() { std::fill_n(data_.get(), bytes_, std::byte{0}); }
  void CopyFrom(const NvmeTestMemory& other) {
    std::copy_n(other.data_.get(), bytes_, data_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  static uint64_t RoundUp(uint64_t bytes) {
    return (bytes + io::kSectorBytes) / io::kSectorBytes * io::kSectorBytes;
  }
  std::unique_ptr<std::byte, Free> data_;
  uint64_t bytes_;
};

// A job with swapped records, its memory, and a model of all its bytes.
//
// Threads: many may call Write() and Compare() at once; one calls the rest.
// Size: one short method for each thing that a test does to the store, or to
// the memory and the disk below it.
class NvmeTestJob {
 public:
  using EngineMaker = std::function<std::unique_ptr<io::IoEngine>()>;
  struct Setup {
    Layout layout;
    uint64_t sub_group_elements = 4096;
    // At most as many as there are records, or the least that may be.
    uint64_t frames = NvmeStore::kFramesMin;
    bool is_durable = true;
    // The job has no parameter area.
    bool holds_parameters = false;
    // Its table is that of a former build: see NvmeSizeOptions.
    bool has_sections = false;
    uint64_t cache_sections =
        storage::kSwapCacheSectionsMin;  // then, of the largest
    std::vector<std::string> directories = {"/disk"};
    std::vector<uint32_t> weights = {};
    uint32_t arrangement = 0;
    EngineMaker make_engine;
    // A file that stands for a device with the records of all directories, from
    // `device_begin` on; empty: each directory has a file.
    std::string device = {};
    uint64_t device_begin = 1 << 20;
  };
  static constexpr uint64_t kIncarnation = 0x1234;

  explicit NvmeTestJob(Setup setup);

  const Layout& layout() const { return setup_.layout; }
  const Setup& setup() const { return setup_; }
  NvmeStore& store() { return *store_; }
  size_t records() const { return model_.sub_groups().size(); }
  const NvmeStore::Sizes& sizes() const { return sizes_; }
  NvmeTestMemory& frames() { return frames_; }
  NvmeTestMemory& table() { return table_; }
  void SetEngineMaker(EngineMaker make) {
    setup_.make_engine = std::move(make);
  }
  // Sets what Open() gives; the job's sizes stay those of its first weights.
  void SetWeights(std::vector<uint32_t> weights) {
    setup_.weights = std::move(weights);
  }

  // Makes the file of the device, where the extents of two arrangements fit.
  absl::Status MakeDevice();
  // By directory, where its records lie on the device; none without one.
  const std::vector<storage::DeviceExtent>& extents() const { return extents_; }
  // Opens the store with memory as it is; zeros: the job is new.
  absl::Status Open(const storage::DurableCommit* restored = nullptr);
  void Close() {
    store_ = nullptr;
    move_ = nullptr;
  }
  // Gives the open store another number of frames, whose memory lies elsewhere
  // from then on. `on_resized` is called when it does, before the store goes
  // on; its error is that of resizing.
  absl::Status ChangeFrames(
      uint64_t frames,
      const std::function<absl::Status()>& on_resized = nullptr);
  // Begins to move the open store's records to another arrangement; the caller
  // has them copied.
  absl::Status BeginMove(std::vector<std::string> directories,
                         std::vector<uint32_t> weights);
  // Ends the move: `on_switched` is called at the moment from which memory is
  // of the new arrangement; its error leaves the former.
  absl::Status FinishMove(
      const std::function<absl::Status()>& on_switched = nullptr);
  // Gives the move up.
  void EndMove();
  // Does all of a move at once.
  absl::Status Rearrange(
      std::vector<std::string> directories, std::vector<uint32_t> weights,
      const std::function<absl::Status()>& on_switched = nullptr);
  // Goes on after a power cut: reads the last commit, with which the model goes
  // on as well. The arrangement is that of the commit.
  absl::Status Restore();

  // Writes random bytes to a record, some pieces of each of its arrays.
  absl::Status Write(size_t record, std::mt19937_64* random);
  void WriteTo(const storage::StateStore::Pin& pin, std::mt19937_64* random);
  // Compares parameters of a record, read alone, with the model.
  absl::Status CompareParameters(size_t record);
  // Compares a record with the model. INTERNAL: it differs.
  absl::Status Compare(size_t record);
  absl::Status CompareAll();
  // Requests a commit and remembers what it is of.
  absl::Status RequestCommit(uint64_t step);
  // Takes what another job of this layout has in memory, its model and its
  // commits included. The other may go on meanwhile.
  void CopyMemoryOf(NvmeTestJob* other);
  // Takes what the commits of another job are of.
  void CopyCommitsOf(NvmeTestJob* other);

 private:
  // The arrangement to which records are being moved.
  struct Move {
    Setup next;
    NvmeTestMemory table;
    storage::RewriteTarget target;
  };

  // Takes the directories, weights and number of another setup.
  void SetArrangement(const Setup& setup);

  Setup setup_;
  const std::vector<std::string> all_directories_;
  NvmeStore::Sizes sizes_;
  NvmeTestModel model_;
  std::mutex commits_mutex_;
  std::map<uint64_t, std::shared_ptr<const NvmeTestModel>> commits_;  // by step
  std::vector<storage::DeviceExtent> extents_;
  std::vector<std::byte> parameters_;
  NvmeTestMemory frames_, table_;
  // By record; held while its bytes are written, to the store and the model.
  std::vector<std::mutex> mutexes_;
  std::unique_ptr<Move> move_;  // outlives the store that uses it
  std::unique_ptr<NvmeStore> store_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_NVME_TEST_JOB_H_
