#include "server/session/testing/job_harness.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "proto/shm/sealed_segment.h"
#include "proto/shm/segment_layout.h"
#include "server/session/testing/asked_storage.h"
#include "storage/block_device/device_format.h"
#include "storage/testing/evicting_store.h"

namespace optstate::session {
namespace {

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "unexpected: %s\n", status.ToString().c_str());
  std::abort();
}

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "unexpected: %s\n", what);
  std::abort();
}

template <typename T>
T ValueOf(absl::StatusOr<T> value) {
  Require(value.status());
  return *std::move(value);
}

constexpr uint64_t kDeviceBytes = uint64_t{64} << 20;

std::string MakeDirectoryIn(const std::string& parent) {
  std::string name = absl::StrCat(parent, "/optstate-job-XXXXXX");
  Require(::mkdtemp(name.data()) != nullptr, "mkdtemp");
  return name;
}

std::string DiskDirectory() {
  const char* given = ::getenv("TEST_TMPDIR");
  return MakeDirectoryIn(given != nullptr ? given : "/tmp");
}

// Returns a new directory, on tmpfs when there is one, as in production.
std::string ScratchDirectory() {
  return ::access("/dev/shm", W_OK) == 0 ? MakeDirectoryIn("/dev/shm")
                                         : DiskDirectory();
}

}  // namespace

ParameterSpec MakeParameter(const std::string& name, int64_t numel,
                            uint32_t group, DType dtype, DType gradient_dtype) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = {numel};
  spec.numel = numel;
  spec.dtype = dtype;
  spec.gradient_dtype = gradient_dtype;
  spec.group = group;
  return spec;
}

JobHarness::JobHarness(Setup setup)
    : setup_(std::move(setup)),
      layout_(ValueOf(Layout::Make(setup_.layout))),
      directory_(ScratchDirectory()),
      disk_(DiskDirectory()) {
  setup_.storage = AskedStorage(setup_.storage);
  setup_.storage = ShareWithDevices(setup_.storage, setup_.layout.optimizer);
  if (EvictsRecords()) frames_ = ScratchDirectory();
  if (setup_.has_device) MakeDevice();
  Require(Open());
}

JobHarness::~JobHarness() {
  Close();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
  std::filesystem::remove_all(disk_, ignored);
  if (!frames_.empty()) std::filesystem::remove_all(frames_, ignored);
}

std::vector<std::string> JobHarness::Disks() const {
  if (setup_.disks == 1) return {disk_};
  std::vector<std::string> disks;
  for (uint32_t i = 0; i < setup_.disks; ++i) {
    disks.push_back(absl::StrCat(disk_, "/", i));
  }
  return disks;
}

void JobHarness::MakeDevice() const {
  std::ofstream(device()).flush();
  std::filesystem::resize_file(device(), kDeviceBytes);
  Require(storage::FormatDevice(disk_, device(), /*force=*/false).status());
}

void JobHarness::DropMemory() {
  std::error_code ignored;
  std::filesystem::remove_all(directory_ + "/state", ignored);
}

void JobHarness::SetLayout(LayoutSpec layout) {
  setup_.layout = std::move(layout);
  layout_ = ValueOf(Layout::Make(setup_.layout));
}

absl::Status JobHarness::OpenWith(std::vector<KeptGradients> kept) {
  Job::Options options;
  options.name = "test";
  options.directory = directory_;
  options.uid = setup_.uid;
  options.observer = setup_.observer;
  options.clock = setup_.clock;
  options.wall_clock = setup_.clock;
  keeper_ = std::make_unique<RecordingKeeper>();
  for (const KeptGradients& one : kept) {
    keeper_->Keep(one.rank, one.client_instance, one.gradient_offset_bytes,
                  one.segment.get());
  }
  if (!frames_.empty()) {
    options.make_host_store =
        [path = frames_ + "/frames"](
            const Layout* layout, uint64_t sub_group_elements,
            const storage::StateMemory& memory, uint64_t incarnation)
        -> absl::StatusOr<std::unique_ptr<storage::StateStore>> {
      return storage::EvictingStore::Open(
          layout, sub_group_elements, memory,
          {.path = path, .incarnation = incarnation, .seed = NextStoreSeed()});
    };
  }
  options.kept = std::move(kept);
  options.keeper = keeper_.get();
  options.config.mutable_engine()->set_workers(setup_.workers);
  options.config.mutable_engine()->set_on_rank_loss(setup_.on_rank_loss);
  options.config.mutable_engine()->set_subgroup_elements(
      setup_.subgroup_elements);
  *options.config.mutable_limits() = setup_.limits;
  *options.config.mutable_nvme() = setup_.nvme;
  // Becomes the least, as a node's default does.
  if (setup_.nvme.job_host_budget_bytes() == 0) {
    options.config.mutable_nvme()->set_job_host_budget_bytes(1);
  }
  for (const std::string& directory : Disks()) {
    std::filesystem::create_directories(directory);
    options.config.mutable_nvme()->add_directories(directory);
  }
  if (setup_.has_device) {
    v1::NvmeDirectory& settings =
        *options.config.mutable_nvme()->add_directory_settings();
    settings.set_path(disk_);
    settings.set_device(device());
  }
  options.config.mutable_nvme()->set_io_engine(setup_.io_engine);
  options.config.mutable_nvme()->set_scrub_interval_s(setup_.scrub_interval_s);
  options.config.mutable_nvme()->set_scrub_bytes_per_s(
      setup_.scrub_bytes_per_s);
  options.config.set_lock_memory(setup_.lock_memory);
  options.config.set_devices(setup_.devices.empty() ? AskedDevices()
                                                    : setup_.devices);
  options.device_runtime = setup_.device_runtime;
  absl::StatusOr<std::unique_ptr<Job>> job = Job::Open(std::move(options));
  if (!job.ok()) return job.status();
  job_ = *std::move(job);
  return absl::OkStatus();
}

void JobHarness::Close() {
  job_.reset();
  if (setup_.client_instance == 0) gradient_areas_.clear();
  listeners_.clear();
}

RegisterSpec JobHarness::SpecOf(uint32_t rank) const {
  RegisterSpec spec;
  spec.layout = layout_;
  spec.rank = rank;
  spec.world_size = setup_.world_size;
  spec.local_world_size = setup_.world_size;
  spec.host_id = "host";
  spec.partition = setup_.partition;
  spec.accumulate = setup_.accumulate;
  spec.accumulate_dtype = setup_.accumulate_dtype;
  spec.ephemeral = setup_.ephemeral;
  spec.storage = setup_.storage;
  // Swapped records are not speculated with.
  spec.speculative =
      setup_.speculative && setup_.storage.placement() != v1::PLACEMENT_NVME;
  return spec;
}

absl::StatusOr<RegisterResult> JobHarness::Register(uint32_t rank,
                                                    bool extend) {
  RegisterSpec spec = SpecOf(rank);
  spec.extend = extend;
  return job_->Register(spec);
}

const RankPartition& JobHarness::PartitionOf(uint32_t rank) {
  return *ValueOf(job_->partition(rank));
}

const Piece* JobHarness::PieceOf(uint32_t rank, uint32_t parameter) {
  const RankPartition& partition = PartitionOf(rank);
  const size_t i = partition.LowerBound(parameter);
  if (i == partition.pieces.size()) return nullptr;
  const Piece& piece = partition.pieces[i];
  return piece.parameter == parameter ? &piece : nullptr;
}

AttachSpec JobHarness::AttachSpecOf(uint32_t rank) {
  const size_t ranks = std::max<size_t>(setup_.world_size, rank + 1);
  if (gradient_areas_.size() < ranks) gradient_areas_.resize(ranks);
  while (listeners_.size() < ranks) {
    listeners_.push_back(std::make_unique<RecordingListener>());
  }
  // The area is never empty, as in a segment.
  const uint64_t bytes = PartitionOf(rank).gradient_area_bytes;
  gradient_areas_[rank].resize(shm::ParameterSegmentBytes(bytes));
  AttachSpec spec;
  spec.rank = rank;
  spec.layout_hash = layout_.hash();
  spec.gradient_area = gradient_areas_[rank].data();
  spec.gradient_area_bytes = bytes;
  spec.listener = listeners_[rank].get();
  if (setup_.client_instance != 0) {
    spec.client_instance = setup_.client_instance + rank;
    spec.gradients_present = true;
    spec.gradient_segment = STDIN_FILENO;  // a stand-in that is never read
  }
  spec.pid = 1000 + rank;
  if (rank < setup_.processes.size()) spec.process = setup_.processes[rank];
  spec.wire = "shm";
  return spec;
}

KeptGradients JobHarness::KeepGradients(uint32_t rank, uint64_t offset_bytes,
                                        uint64_t present_bytes) {
  const std::vector<std::byte>& area = gradient_areas_[rank];
  auto segment = ValueOf(shm::SealedSegment::Create(
      "kept", offset_bytes + area.size(), shm::SealedSegment::Pages::kNone));
  // Pages are there once they are written.
  std::memset(segment.data(), 0, offset_bytes);
  std::memcpy(segment.data() + offset_bytes, area.data(),
              std::min<uint64_t>(present_bytes, area.size()));
  KeptGradients kept;
  kept.rank = rank;
  kept.client_instance = setup_.client_instance + rank;
  kept.gradient_offset_bytes = offset_bytes;
  kept.segment.reset(::dup(segment.fd()));
  return kept;
}

void JobHarness::AttachAll() {
  for (uint32_t rank = 0; rank < setup_.world_size; ++rank) {
    Require(Register(rank).status());
    Require(Attach(rank).status());
  }
}

void JobHarness::DetachAll() {
  for (uint32_t rank = 0; rank < setup_.world_size; ++rank) Detach(rank);
}

void JobHarness::Start(const Tensors& masters) {
  AttachAll();
  LoadMasters(masters);
  Require(FinishAll().status);
}

absl::Status JobHarness::LoadArray(uint32_t rank, v1::StateArray array,
                                   uint32_t parameter,
                                   const std::vector<float>& values) {
  const Piece* piece = PieceOf(rank, parameter);
  if (piece == nullptr || piece->numel == 0) return absl::OkStatus();
  const absl::Span<const float> part =
      absl::MakeConstSpan(values).subspan(piece->begin, piece->numel);
  return job_->Load(
      rank, array, parameter, piece->begin, piece->numel, DType::kFloat32,
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(part.data()),
                          part.size() * sizeof(float)));
}

absl::Status JobHarness::LoadMaster(uint32_t rank, uint32_t parameter,
                                    const std::vector<float>& values) {
  return LoadArray(rank, v1::STATE_ARRAY_MASTER, parameter, values);
}

void JobHarness::LoadMasters(const Tensors& masters) {
  for (uint32_t rank = 0; rank < setup_.world_size; ++rank) {
    Require(job_->BeginLoad(rank));
    for (uint32_t p = 0; p < masters.size(); ++p) {
      Require(LoadMaster(rank, p, masters[p]));
    }
  }
}

RecordingListener::Answer JobHarness::FinishAll(const LoadEnd& end) {
  const uint64_t first = next_request_;
  for (uint32_t rank = 0; rank < setup_.world_size; ++rank) {
    job_->FinishLoad(rank, next_request_++, end);
  }
  for (uint32_t rank = 0; rank < setup_.world_size; ++rank) {
    const auto* answer = AnswerTo(rank, first + rank);
    if (answer == nullptr) return {absl::UnknownError("no answer"), {}};
    if (!answer->status.ok()) return *answer;
  }
  return *AnswerTo(0, first);
}

void JobHarness::SetGradient(uint32_t parameter,
                             const std::vector<float>& values) {
  const DType dtype = layout_.parameters()[parameter].gradient_dtype;
  for (uint32_t rank = 0; rank < setup_.world_size; ++rank) {
    const Piece* piece = PieceOf(rank, parameter);
    if (piece == nullptr) continue;
    // The engine sums the gradients: the first rank has all of the values.
    if (setup_.partition == PartitionMode::kReplicated && rank > 0) {
      std::memset(gradient_areas_[rank].data() + piece->gradient_offset_bytes,
                  0, piece->numel * SizeInBytes(dtype));
      continue;
    }
    kernels::CastFromFloat(
        dtype, values.data() + piece->begin,
        gradient_areas_[rank].data() + piece->gradient_offset_bytes,
        piece->numel);
  }
}

void JobHarness::SetGradientsOf(uint32_t rank, const Tensors& gradients) {
  for (const Piece& piece : PartitionOf(rank).pieces) {
    kernels::CastFromFloat(
        layout_.parameters()[piece.parameter].gradient_dtype,
        gradients[piece.parameter].data(),
        gradient_areas_[rank].data() + piece.gradient_offset_bytes,
        piece.numel);
  }
}

uint64_t JobHarness::EndMicroStep(uint32_t rank, uint64_t step,
                                  uint32_t micro_step) {
  const uint64_t request = next_request_++;
  job_->EndMicroStep(rank, request, step, micro_step);
  return request;
}

void JobHarness::SetGradients(const Tensors& gradients) {
  for (uint32_t p = 0; p < gradients.size(); ++p) SetGradient(p, gradients[p]);
}

void JobHarness::PushAll(uint64_t step, uint32_t micro_step,
                         const std::vector<uint32_t>& without) {
  const auto count = static_cast<uint32_t>(layout_.parameters().size());
  for (uint32_t rank = 0; rank < setup_.world_size; ++rank) {
    uint32_t begin = 0;
    for (const uint32_t hole : without) {
      Require(Push(rank, step, begin, hole - begin, micro_step));
      begin = hole + 1;
    }
    Require(Push(rank, step, begin, count - begin, micro_step));
  }
}

uint64_t JobHarness::Commit(uint32_t rank, const CommitSpec& spec) {
  const uint64_t request = next_request_++;
  job_->Commit(rank, request, spec);
  return request;
}

RecordingListener::Answer JobHarness::CommitAll(const CommitSpec& spec) {
  const uint64_t first = next_request_;
  for (uint32_t rank = 0; rank < setup_.world_size; ++rank) Commit(rank, spec);
  const auto* answer = AnswerTo(0, first);
  Require(answer != nullptr, "no answer to the commit");
  for (uint32_t rank = 1; rank < setup_.world_size; ++rank) {
    const auto* other = AnswerTo(rank, first + rank);
    Require(other != nullptr && other->status == answer->status &&
                other->outcome.step == answer->outcome.step &&
                other->outcome.applied == answer->outcome.applied,
            "the ranks were answered differently");
  }
  return *answer;
}

StepOutcome JobHarness::Step(uint64_t step, const Tensors& gradients,
                             const CommitSpec& spec,
                             const std::vector<uint32_t>& without) {
  SetGradients(gradients);
  PushAll(step, 0, without);
  const RecordingListener::Answer answer = CommitAll(spec);
  Require(answer.status);
  Require(answer.outcome.applied, "the step was skipped");
  return answer.outcome;
}

size_t JobHarness::ElementsOf(v1::StateArray array, uint32_t parameter) const {
  const ParameterSpec& spec = layout_.parameters()[parameter];
  const int index = static_cast<int>(array) - v1::STATE_ARRAY_STATE_0;
  if (!layout_.has_state_array(index)) return static_cast<size_t>(spec.numel);
  return StateElements(layout_.optimizer_info(), index, spec.shape);
}

std::vector<float> JobHarness::Fetch(v1::StateArray array, uint32_t parameter) {
  std::vector<float> values(ElementsOf(array, parameter));
  Require(
      job_->Fetch(array, parameter, 0, values.size(),
                  absl::MakeSpan(reinterpret_cast<std::byte*>(values.data()),
                                 values.size() * sizeof(float)))
          .status());
  return values;
}

std::vector<int64_t> JobHarness::StepCounts() {
  std::vector<int64_t> counts(layout_.parameters().size());
  Require(
      job_->Fetch(v1::STATE_ARRAY_STEP_COUNT, 0, 0, counts.size(),
                  absl::MakeSpan(reinterpret_cast<std::byte*>(counts.data()),
                                 counts.size() * sizeof(int64_t)))
          .status());
  return counts;
}

std::vector<float> JobHarness::Parameter(uint32_t parameter) {
  const ParameterSpec& spec = layout_.parameters()[parameter];
  std::vector<float> values(static_cast<size_t>(spec.numel));
  const uint64_t begin = layout_.parameter_offset_bytes(parameter);
  std::vector<std::byte> elements(values.size() * SizeInBytes(spec.dtype));
  if (setup_.storage.parameters_on_disk()) {
    Require(job_->Fetch(v1::STATE_ARRAY_PARAMETER, parameter, 0, values.size(),
                        absl::MakeSpan(elements))
                .status());
    kernels::CastToFloat(spec.dtype, elements.data(), values.data(),
                         values.size());
    return values;
  }
  const UniqueFd file = ValueOf(job_->OpenParameters());
  if (::pread(file.get(), elements.data(), elements.size(),
              static_cast<off_t>(begin)) !=
      static_cast<ssize_t>(elements.size())) {
    Require(absl::InternalError("the parameter file cannot be read"));
  }
  kernels::CastToFloat(spec.dtype, elements.data(), values.data(),
                       values.size());
  return values;
}

std::string JobHarness::StateBytes() {
  std::string bytes;
  const auto append = [&bytes](const std::vector<float>& values) {
    bytes.append(reinterpret_cast<const char*>(values.data()),
                 values.size() * sizeof(float));
  };
  for (uint32_t p = 0; p < layout_.parameters().size(); ++p) {
    append(Fetch(v1::STATE_ARRAY_MASTER, p));
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!layout_.has_state_array(k, layout_.parameters()[p].group)) continue;
      append(
          Fetch(static_cast<v1::StateArray>(v1::STATE_ARRAY_STATE_0 + k), p));
    }
    append(Parameter(p));
  }
  for (const int64_t count : StepCounts()) absl::StrAppend(&bytes, count, ",");
  return bytes;
}

Tensors JobHarness::RandomTensors(uint64_t seed, float scale) const {
  std::mt19937_64 generator(seed);
  std::uniform_real_distribution<float> uniform(-scale, scale);
  Tensors tensors;
  for (const ParameterSpec& spec : layout_.parameters()) {
    std::vector<float>& values =
        tensors.emplace_back(static_cast<size_t>(spec.numel));
    for (float& value : values) value = uniform(generator);
  }
  return tensors;
}

}  // namespace optstate::session
