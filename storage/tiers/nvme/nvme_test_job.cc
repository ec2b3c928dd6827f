#include "storage/tiers/nvme/nvme_test_job.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/types/array_format.h"
#include "proto/types/status_macros.h"

namespace optstate::nvme {
namespace {

// More than any test has.
constexpr uint64_t kDirectoriesMax = 8;

// A size with which a commit fills several sectors.
constexpr uint64_t kJobBytes = 2000;

std::string JobText(uint64_t step, uint32_t arrangement) {
  return std::string(kJobBytes - 40 + step % 10,
                     static_cast<char>('a' + step % 26)) +
         absl::StrCat(step, " ", arrangement);
}

// Returns the arrangement that a text of JobText() is of.
uint32_t ArrangementOf(const std::string& text) {
  uint32_t arrangement = 0;
  const size_t space = text.rfind(' ');
  if (space == std::string::npos ||
      !absl::SimpleAtoi(text.substr(space), &arrangement)) {
    return UINT32_MAX;
  }
  return arrangement;
}

NvmeStore::Sizes SizesOf(const NvmeTestJob::Setup& setup) {
  return NvmeStore::SizesOf(
      setup.layout, setup.sub_group_elements,
      {.is_durable = setup.is_durable,
       .directories = static_cast<uint32_t>(setup.directories.size()),
       .job_bytes = kJobBytes,
       .weights = setup.weights,
       .holds_parameters = setup.holds_parameters,
       .has_sections = setup.has_sections});
}

std::vector<storage::DeviceExtent> ExtentsOf(const NvmeTestJob::Setup& setup,
                                             const NvmeStore::Sizes& sizes) {
  std::vector<storage::DeviceExtent> extents;
  if (setup.device.empty()) return extents;
  // Arrangements take turns with two parts of the device.
  uint64_t all = 0;
  for (const uint64_t bytes : sizes.records_by_directory) all += bytes;
  const uint64_t part = all + kDirectoriesMax * io::kSectorBytes;
  uint64_t begin = setup.device_begin + setup.arrangement % 2 * part;
  for (const uint64_t bytes : sizes.records_by_directory) {
    extents.push_back({setup.device, {begin, bytes}});
    begin += bytes;
  }
  return extents;
}

}  // namespace

NvmeTestModel::NvmeTestModel(const Layout* layout, uint64_t sub_group_elements)
    : parameters_(layout->parameter_area_bytes()),
      master_(layout->flat_elements() * sizeof(float)) {
  storage::StateArrays arrays;
  arrays.parameters = parameters_.data();
  arrays.master = master_.data();
  for (size_t k = 0; k < kStateArraysMax; ++k) {
    if (!layout->has_state_array(static_cast<int>(k))) continue;
    state_[k].resize(layout->flat_elements() * sizeof(float));
    arrays.state[k] = state_[k].data();
    if (ArrayFormat(*layout, static_cast<int>(k)) != StateFormat::kDynamic8) {
      continue;
    }
    scale_[k].resize(layout->flat_elements() / kQuantizedBlockElements);
    arrays.scale[k] = scale_[k].data();
  }
  store_ =
      std::make_unique<storage::HostStore>(layout, sub_group_elements, arrays);
}

void NvmeTestModel::CopyFrom(const NvmeTestModel& other) {
  const auto copy = [](const auto& from, auto* to) {
    std::copy(from.begin(), from.end(), to->begin());
  };
  copy(other.parameters_, &parameters_);
  copy(other.master_, &master_);
  for (size_t k = 0; k < kStateArraysMax; ++k) {
    copy(other.state_[k], &state_[k]);
    copy(other.scale_[k], &scale_[k]);
  }
}

std::vector<absl::Span<std::byte>> KeptPieces(const Layout& layout,
                                              const storage::RecordView& record,
                                              bool holds_parameters) {
  std::vector<absl::Span<std::byte>> pieces;
  const SubGroup& range = record.sub_group();
  bool has_masters = false;
  for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
    const ParameterSpec& spec = layout.parameters()[p];
    const uint64_t flat = layout.flat_offset(p);
    const uint64_t begin = std::max(flat, range.begin);
    const uint64_t end =
        std::min(flat + static_cast<uint64_t>(spec.numel), range.end);
    has_masters |= layout.master_format(p) != MasterFormat::kParameter;
    if (begin >= end || (!holds_parameters &&
                         layout.master_format(p) == MasterFormat::kFloat32)) {
      continue;
    }
    pieces.push_back({record.parameter(p, begin - flat),
                      (end - begin) * SizeInBytes(spec.dtype)});
  }
  for (int part = 0; part < storage::kRecordPartCount; ++part) {
    if (part == storage::kMasterPart && !has_masters) continue;
    if (part >= storage::kStatePart0 &&
        !layout.has_state_array((part - storage::kStatePart0) % kStateArraysMax,
                                range.group)) {
      continue;
    }
    const absl::Span<std::byte> bytes = record.part(part);
    if (!bytes.empty()) pieces.push_back(bytes);
  }
  return pieces;
}

NvmeTestJob::NvmeTestJob(Setup setup)
    : setup_(std::move(setup)),
      all_directories_(setup_.directories),
      sizes_(SizesOf(setup_)),
      model_(&setup_.layout, setup_.sub_group_elements),
      extents_(ExtentsOf(setup_, sizes_)),
      parameters_(setup_.layout.parameter_area_bytes()),
      frames_(sizes_.frame * setup_.frames),
      table_(sizes_.table),
      mutexes_(sizes_.records) {}

absl::Status NvmeTestJob::MakeDevice() {
  const std::unique_ptr<io::IoEngine> engine = setup_.make_engine();
  Setup next = setup_;
  ++next.arrangement;
  const uint64_t end = ExtentsOf(next, sizes_).back().extent.end_bytes();
  OPTSTATE_ASSIGN_OR_RETURN(
      const io::FileId file,
      engine->Open(setup_.device, end + kDirectoriesMax * io::kSectorBytes,
                   io::IoEngine::OpenMode::kCreate));
  engine->Close(file);
  return absl::OkStatus();
}

absl::Status NvmeTestJob::Open(const storage::DurableCommit* restored) {
  NvmeStore::Options options;
  options.engine = setup_.make_engine();
  options.directories = setup_.directories;
  options.weights = setup_.weights;
  options.extents = extents_;
  options.arrangement = setup_.arrangement;
  options.frames = frames_.span();
  options.table = table_.span();
  options.incarnation = kIncarnation;
  options.is_durable = setup_.is_durable;
  options.job_bytes = kJobBytes;
  options.restored = restored;
  storage::StateArrays arrays;
  arrays.parameters = setup_.holds_parameters ? nullptr : parameters_.data();
  options.holds_parameters = setup_.holds_parameters;
  options.parameter_cache_bytes = setup_.cache_sections * sizes_.section;
  OPTSTATE_ASSIGN_OR_RETURN(
      store_, NvmeStore::Open(&setup_.layout, setup_.sub_group_elements, arrays,
                              std::move(options)));
  return absl::OkStatus();
}

absl::Status NvmeTestJob::ChangeFrames(
    uint64_t frames, const std::function<absl::Status()>& on_resized) {
  return store_->ChangeFrames(
      static_cast<uint32_t>(frames), [&](absl::Span<std::byte>* memory) {
        NvmeTestMemory next(sizes_.frame * frames);
        const auto kept = frames_.span().first(
            std::min(frames_.span().size(), next.span().size()));
        std::copy(kept.begin(), kept.end(), next.span().begin());
        // Makes a use of the former memory show.
        std::fill(frames_.span().begin(), frames_.span().end(),
                  std::byte{0xA5});
        frames_ = std::move(next);
        setup_.frames = frames;
        *memory = frames_.span();
        return on_resized == nullptr ? absl::OkStatus() : on_resized();
      });
}

void NvmeTestJob::SetArrangement(const Setup& setup) {
  setup_.directories = setup.directories;
  setup_.weights = setup.weights;
  setup_.arrangement = setup.arrangement;
  sizes_ = SizesOf(setup_);
  extents_ = ExtentsOf(setup_, sizes_);
}

absl::Status NvmeTestJob::BeginMove(std::vector<std::string> directories,
                                    std::vector<uint32_t> weights) {
  Setup next = setup_;
  next.directories = std::move(directories);
  next.weights = std::move(weights);
  ++next.arrangement;
  const uint64_t table_bytes = SizesOf(next).table;
  auto move = std::make_unique<Move>(
      Move{std::move(next), NvmeTestMemory(table_bytes), {}});
  move->target.layout = &setup_.layout;
  move->target.sub_group_elements = setup_.sub_group_elements;
  move->target.arrangement = {move->next.arrangement, move->next.directories,
                              ExtentsOf(move->next, SizesOf(move->next)),
                              move->next.weights};
  move->target.job_bytes = kJobBytes;
  move->target.table = move->table.span();
  OPTSTATE_RETURN_IF_ERROR(store_->BeginMove(move->target));
  move_ = std::move(move);
  return absl::OkStatus();
}

absl::Status NvmeTestJob::FinishMove(
    const std::function<absl::Status()>& on_switched) {
  // An error of it is returned by the move, too.
  store_->AwaitCommit().IgnoreError();
  move_->target.job = JobText(store_->durable_step(), move_->next.arrangement);
  const absl::Status status = store_
                                  ->FinishMove([&] {
                                    const Setup former = setup_;
                                    std::swap(table_, move_->table);
                                    SetArrangement(move_->next);
                                    absl::Status switched;
                                    if (on_switched != nullptr)
                                      switched = on_switched();
                                    if (switched.ok()) return switched;
                                    std::swap(table_, move_->table);
                                    SetArrangement(former);
                                    return switched;
                                  })
                                  .status();
  move_ = nullptr;
  return status;
}

void NvmeTestJob::EndMove() {
  store_->EndMove();
  move_ = nullptr;
}

absl::Status NvmeTestJob::Rearrange(
    std::vector<std::string> directories, std::vector<uint32_t> weights,
    const std::function<absl::Status()>& on_switched) {
  OPTSTATE_RETURN_IF_ERROR(
      BeginMove(std::move(directories), std::move(weights)));
  const absl::Status copied = store_->CopyRecords();
  if (copied.ok()) return FinishMove(on_switched);
  EndMove();
  return copied;
}

absl::Status NvmeTestJob::Restore() {
  Close();
  frames_.Zero();
  table_.Zero();
  std::fill(parameters_.begin(), parameters_.end(), std::byte{0});
  storage::DurableCommit commit;
  {
    const std::unique_ptr<io::IoEngine> engine = setup_.make_engine();
    OPTSTATE_ASSIGN_OR_RETURN(
        commit, NvmeStore::ReadCommit(engine.get(), setup_.directories));
  }
  const auto found = commits_.find(commit.step);
  const uint32_t arrangement = ArrangementOf(commit.job);
  if (found == commits_.end() ||
      commit.job != JobText(commit.step, arrangement)) {
    return absl::InternalError(
        absl::StrCat("step ", commit.step, " was not committed"));
  }
  if (arrangement != setup_.arrangement) {
    Setup next = setup_;
    next.directories.assign(all_directories_.begin(),
                            all_directories_.begin() + commit.paths);
    next.weights = commit.weights;
    next.arrangement = arrangement;
    SetArrangement(next);
    table_ = NvmeTestMemory(sizes_.table);
  }
  model_.CopyFrom(*found->second);
  OPTSTATE_RETURN_IF_ERROR(Open(&commit));
  if (store_->durable_step() != commit.step) {
    return absl::InternalError("the durable step is another");
  }
  return store_->RestoreParameters();
}

void NvmeTestJob::WriteTo(const storage::StateStore::Pin& pin,
                          std::mt19937_64* random) {
  const auto index = static_cast<size_t>(&pin.record().sub_group() -
                                         store_->sub_groups().all().data());
  const auto pieces =
      KeptPieces(layout(), pin.record(), setup_.holds_parameters);
  const auto expected =
      KeptPieces(layout(), model_.record(index), setup_.holds_parameters);
  const std::lock_guard<std::mutex> lock(mutexes_[index]);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const uint64_t size = pieces[i].size();
    uint64_t begin = (*random)() % size;
    const uint64_t end = std::min<uint64_t>(size, begin + (*random)() % 3000);
    for (; begin < end; begin += 8) {
      const uint64_t value = (*random)();
      const uint64_t bytes = std::min<uint64_t>(end - begin, 8);
      std::memcpy(pieces[i].data() + begin, &value, bytes);
      std::memcpy(expected[i].data() + begin, &value, bytes);
    }
  }
}

absl::Status NvmeTestJob::Write(size_t record, std::mt19937_64* random) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const storage::StateStore::Pin pin,
      store_->PinSubGroup(record, storage::StateStore::Access::kWrite));
  WriteTo(pin, random);
  return absl::OkStatus();
}

absl::Status NvmeTestJob::Compare(size_t record) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const storage::StateStore::Pin pin,
      store_->PinSubGroup(record, storage::StateStore::Access::kRead));
  const std::lock_guard<std::mutex> lock(mutexes_[record]);
  const auto pieces =
      KeptPieces(layout(), pin.record(), setup_.holds_parameters);
  const auto expected =
      KeptPieces(layout(), model_.record(record), setup_.holds_parameters);
  if (pieces.size() != expected.size()) {
    return absl::InternalError("a record has other arrays");
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (absl::MakeConstSpan(pieces[i]) != absl::MakeConstSpan(expected[i])) {
      return absl::InternalError(
          absl::StrCat("record ", record, ", piece ", i, " differs"));
    }
  }
  return absl::OkStatus();
}

absl::Status NvmeTestJob::CompareParameters(size_t record) {
  const storage::RecordView expected = model_.record(record);
  const SubGroup& range = expected.sub_group();
  for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
    const ParameterSpec& spec = layout().parameters()[p];
    const uint64_t flat = layout().flat_offset(p);
    const uint64_t begin = std::max(flat, range.begin);
    const uint64_t end =
        std::min(flat + static_cast<uint64_t>(spec.numel), range.end);
    if (begin >= end) continue;
    std::vector<std::byte> found((end - begin) * SizeInBytes(spec.dtype));
    const std::lock_guard<std::mutex> lock(mutexes_[record]);
    OPTSTATE_RETURN_IF_ERROR(
        store_->ReadParameter(p, begin - flat, end - begin, found.data()));
    if (!std::equal(found.begin(), found.end(),
                    expected.parameter(p, begin - flat))) {
      return absl::InternalError(
          absl::StrCat("parameter ", p, " differs in record ", record));
    }
  }
  return absl::OkStatus();
}

absl::Status NvmeTestJob::CompareAll() {
  absl::Status status;
  for (size_t i = 0; i < records() && status.ok(); ++i) status = Compare(i);
  return status;
}

absl::Status NvmeTestJob::RequestCommit(uint64_t step) {
  auto model = std::make_shared<NvmeTestModel>(&setup_.layout,
                                               setup_.sub_group_elements);
  model->CopyFrom(model_);
  {
    const std::lock_guard<std::mutex> lock(commits_mutex_);
    commits_[step] = std::move(model);
  }
  return store_->RequestCommit(step, JobText(step, setup_.arrangement));
}

void NvmeTestJob::CopyMemoryOf(NvmeTestJob* other) {
  Close();
  for (std::mutex& mutex : other->mutexes_) mutex.lock();
  model_.CopyFrom(other->model_);
  parameters_ = other->parameters_;
  frames_.CopyFrom(other->frames_);
  SetArrangement(other->setup_);
  table_ = NvmeTestMemory(sizes_.table);
  table_.CopyFrom(other->table_);
  for (std::mutex& mutex : other->mutexes_) mutex.unlock();
  CopyCommitsOf(other);
}

void NvmeTestJob::CopyCommitsOf(NvmeTestJob* other) {
  const std::lock_guard<std::mutex> lock(other->commits_mutex_);
  commits_ = other->commits_;
}

}  // namespace optstate::nvme
