#ifndef OPTSTATE_SERVER_SESSION_TESTING_JOB_HARNESS_H_
#define OPTSTATE_SERVER_SESSION_TESTING_JOB_HARNESS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "server/session/job.h"
#include "server/session/testing/recording_keeper.h"
#include "server/session/testing/recording_listener.h"

namespace optstate::session {

// Values of every parameter of a layout, in order.
using Tensors = std::vector<std::vector<float>>;

// A real Job in a scratch directory with all its ranks in this process, without
// transports. A call that the test does not expect to fail stops the test when
// it does. With OPTSTATE_TEST_STORE=evicting in the environment, records in
// memory are those of an EvictingStore (storage/testing); its seed is printed.
// Size: one short method for each call that the suites of jobs make.
class JobHarness {
 public:
  struct Setup {
    LayoutSpec layout;
    uint32_t world_size = 1;
    PartitionMode partition = PartitionMode::kGreedy;
    bool accumulate = false;
    AccumulateDType accumulate_dtype = AccumulateDType::kFloat32;
    bool ephemeral = false;
    uint32_t workers = 2;
    bool speculative = false;
    uint32_t subgroup_elements = 8192;
    v1::RankLoss on_rank_loss = v1::RANK_LOSS_WAIT;
    // Rank r attaches as client_instance + r, with the gradients that it had
    // before; 0: as a new instance, without gradients.
    uint64_t client_instance = 0;
    std::vector<RankProcess> processes;  // by rank; missing: unknown
    v1::Limits limits;
    // PLACEMENT_NVME without a budget: on a disk, in as few frames as can be.
    v1::StorageSettings storage;
    v1::NvmeSettings nvme;  // but for `directories` and the settings below
    uint32_t disks = 1;     // how many directories the daemon has
    v1::IoEngineKind io_engine = v1::IO_ENGINE_KIND_UNSPECIFIED;
    uint32_t scrub_interval_s = 0;  // never
    uint64_t scrub_bytes_per_s = 0;
    // The records lie on a device, for which a file stands.
    bool has_device = false;
    v1::LockMemory lock_memory = v1::LOCK_MEMORY_UNSPECIFIED;
    // DaemonConfig.devices; empty: those that the environment asks for.
    std::string devices;
    accelerator::DeviceRuntime* device_runtime = nullptr;
    uint32_t uid = 0;  // owner of the job
    scheduler::StepObserver* observer = nullptr;
    std::function<absl::Time()> clock = absl::Now;  // of both kinds
  };

  // Makes the directory and opens the job.
  explicit JobHarness(Setup setup);
  ~JobHarness();

  Job& job() { return *job_; }
  const std::string& directory() const { return directory_; }
  // The daemon's directory on disk; of several, the one that they are in.
  const std::string& disk() const { return disk_; }
  std::vector<std::string> Disks() const;
  // The device of that directory, with Setup::has_device.
  std::string device() const { return disk_ + "/the_device"; }
  // Removes all that lies in memory, as a power cut does; the job is closed.
  void DropMemory();
  const Layout& layout() const { return layout_; }
  // The setup may change between Close and Open, or before ranks register
  // again.
  Setup& setup() { return setup_; }
  void SetLayout(LayoutSpec layout);

  absl::Status Open() { return OpenWith({}); }
  // Opens the job with a keeper that holds `kept`.
  absl::Status OpenWith(std::vector<KeptGradients> kept);
  // Closes the job as an engine's exit does: sessions end, files stay.
  void Close();

  RegisterSpec SpecOf(uint32_t rank) const;
  absl::StatusOr<RegisterResult> Register(uint32_t rank, bool extend = false);
  AttachSpec AttachSpecOf(uint32_t rank);
  absl::StatusOr<AttachResult> Attach(uint32_t rank) {
    return job_->Attach(AttachSpecOf(rank));
  }
  // Returns the rank's gradients in a sealed segment, as its supervisor keeps
  // them; of the area only the pages of the first `present_bytes` are there.
  KeptGradients KeepGradients(uint32_t rank, uint64_t offset_bytes,
                              uint64_t present_bytes = AttachSpec::kAllPresent);
  void Detach(uint32_t rank) { job_->Detach(rank); }
  // Registers and attaches all ranks.
  void AttachAll();
  void DetachAll();

  // Starts a new job: attaches, loads these masters, finishes.
  void Start(const Tensors& masters);
  absl::Status LoadMaster(uint32_t rank, uint32_t parameter,
                          const std::vector<float>& values);
  // Loads this rank's parts of an array.
  absl::Status LoadArray(uint32_t rank, v1::StateArray array,
                         uint32_t parameter, const std::vector<float>& values);
  void LoadMasters(const Tensors& masters);
  RecordingListener::Answer FinishAll(const LoadEnd& end = {});

  // Writes gradients to the ranks' areas, in the gradient dtype.
  void SetGradients(const Tensors& gradients);
  void SetGradient(uint32_t parameter, const std::vector<float>& values);
  // Writes one rank's own gradients, in a replicated job.
  void SetGradientsOf(uint32_t rank, const Tensors& gradients);
  absl::Status Push(uint32_t rank, uint64_t step, uint32_t first,
                    uint32_t count, uint32_t micro_step = 0) {
    return job_->Push(rank, step, micro_step, first, count);
  }
  // Returns the request's id.
  uint64_t EndMicroStep(uint32_t rank, uint64_t step, uint32_t micro_step);
  // Has all ranks push all parameters but those in `without`.
  void PushAll(uint64_t step, uint32_t micro_step = 0,
               const std::vector<uint32_t>& without = {});
  // Returns the request's id.
  uint64_t Commit(uint32_t rank, const CommitSpec& spec);
  // Has all ranks commit; the answers must be equal.
  RecordingListener::Answer CommitAll(const CommitSpec& spec);
  // Returns null while the rank was not answered.
  const RecordingListener::Answer* AnswerTo(uint32_t rank,
                                            uint64_t request) const {
    return listeners_[rank]->Find(request);
  }

  // Covers ranks that have a client_instance; empty between Close and Open.
  std::map<uint32_t, uint64_t> kept() const { return keeper_->kept(); }
  std::vector<std::string> NoticesTo(uint32_t rank) const {
    return listeners_[rank]->notices();
  }

  // Runs PushAll and CommitAll; the step must be applied.
  StepOutcome Step(uint64_t step, const Tensors& gradients,
                   const CommitSpec& spec,
                   const std::vector<uint32_t>& without = {});

  size_t ElementsOf(v1::StateArray array, uint32_t parameter) const;
  std::vector<float> Fetch(v1::StateArray array, uint32_t parameter);
  std::vector<int64_t> StepCounts();
  // Returns the parameter area's elements of a parameter, as floats; where
  // there is none, what is fetched.
  std::vector<float> Parameter(uint32_t parameter);
  // Returns every array of the state and the parameter area, bit by bit.
  std::string StateBytes();

  // Returns random values, small enough to stay finite.
  Tensors RandomTensors(uint64_t seed, float scale = 1) const;

 private:
  void MakeDevice() const;
  const RankPartition& PartitionOf(uint32_t rank);
  // Returns null when the rank has no part of the parameter.
  const Piece* PieceOf(uint32_t rank, uint32_t parameter);

  Setup setup_;
  Layout layout_;
  std::string directory_;
  std::string disk_;
  // The folder of an EvictingStore's frames; empty: jobs have their own store.
  std::string frames_;
  std::unique_ptr<RecordingKeeper> keeper_;
  std::unique_ptr<Job> job_;
  std::vector<std::vector<std::byte>> gradient_areas_;  // by rank
  std::vector<std::unique_ptr<RecordingListener>> listeners_;
  uint64_t next_request_ = 1;
};

// Returns one parameter of the given size.
ParameterSpec MakeParameter(const std::string& name, int64_t numel,
                            uint32_t group = 0, DType dtype = DType::kFloat32,
                            DType gradient_dtype = DType::kFloat32);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_JOB_HARNESS_H_
