#include "storage/tiers/nvme/nvme_store.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/status_macros.h"
#include "storage/persist_in_order.h"
#include "storage/tiers/nvme/next_arrangement.h"
#include "storage/tiers/nvme/store_opener.h"

namespace optstate::nvme {

NvmeStore::Sizes NvmeStore::SizesOf(const Layout& layout,
                                    uint64_t sub_group_elements,
                                    const SizeOptions& options) {
  return StoreOpener::SizesOf(layout, sub_group_elements, options);
}

NvmeStore::NvmeStore(const Layout* layout, uint64_t sub_group_elements,
                     const storage::StateMemory& memory, Options options)
    : storage::StateStore(layout, sub_group_elements, memory),
      context_(layout, &sub_groups(), arrays().parameters, std::move(options)),
      monitor_(&context_),
      cache_(context_.frames(), context_.records(), &context_.table),
      queue_(&cache_),
      checks_(&context_, &monitor_, &cache_),
      committer_(&context_, &monitor_, &cache_, &queue_),
      verifier_(&context_, &monitor_, &cache_, &committer_),
      parameters_(&context_, &monitor_, &cache_),
      mover_(&context_, &monitor_, &cache_, &committer_),
      swapper_(&context_, &monitor_, &cache_, &queue_, &checks_, &committer_,
               &verifier_, &parameters_, &mover_),
      io_thread_(&context_, &monitor_, &cache_, &swapper_, &committer_,
                 &verifier_, &parameters_, &mover_) {}

absl::StatusOr<std::unique_ptr<NvmeStore>> NvmeStore::Open(
    const Layout* layout, uint64_t sub_group_elements,
    const storage::StateMemory& memory, Options options) {
  const storage::DurableCommit* const restored =
      std::exchange(options.restored, nullptr);
  std::unique_ptr<NvmeStore> store(
      new NvmeStore(layout, sub_group_elements, memory, std::move(options)));
  StoreOpener opener(&store->context_);
  OPTSTATE_RETURN_IF_ERROR(opener.Open(restored));
  std::vector<uint8_t> unsynced;
  {
    const absl::MutexLock lock(&store->monitor_.mu);
    store->committer_.Adopt();
    unsynced = opener.MarkUnsynced(store->committer_);
    store->cache_.Adopt();
  }
  OPTSTATE_RETURN_IF_ERROR(store->parameters_.Open());
  store->io_thread_.Start();
  OPTSTATE_RETURN_IF_ERROR(store->RewriteUnsynced(unsynced));
  return store;
}

// A pass makes each record newer than on disk. So the records are read ahead
// and written behind as in a step, several at once, in the frames that there
// are; those that it leaves in frames are flushed by the next commit.
//
// No order between records is needed, for each is whole somewhere at any
// moment: it is compared before a frame is named, and the place names the
// frame, and says that it is newer, until a write of all of it is over. An
// engine that is killed in the middle leaves is_syncing, so the next one begins
// again. No slot that the last commit names is written, so a power cut goes
// back to that commit. The sync of the next commit is not submitted while a
// record is being written, so it is for all of these writes. Only when each
// record has been newer than on disk is is_syncing cleared: from then on its
// place says what is left to be written.
absl::Status NvmeStore::RewriteUnsynced(absl::Span<const uint8_t> unsynced) {
  if (std::find(unsynced.begin(), unsynced.end(), 1) != unsynced.end()) {
    OPTSTATE_ASSIGN_OR_RETURN(const size_t records, BeginPass(unsynced));
    for (size_t i = 0; i < records; ++i) {
      OPTSTATE_RETURN_IF_ERROR(PinOfPass(i).status());
    }
  }
  const absl::MutexLock lock(&monitor_.mu);
  if (context_.table.is_syncing()) context_.table.SetSyncing(false);
  return absl::OkStatus();
}

absl::StatusOr<storage::DurableCommit> NvmeStore::ReadCommit(
    io::IoEngine* engine, absl::Span<const std::string> directories) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<DurableLog> log,
                            DurableLog::Open(engine, directories[0]));
  if (log->last().generation != 0) {
    engine->Close(log->file());
    return log->last();
  }
  engine->Close(log->file());
  if (!log->is_first_torn()) OPTSTATE_RETURN_IF_ERROR(log->damage());
  return absl::NotFoundError(
      absl::StrCat(directories[0], ": the job was never durable"));
}

NvmeStore::~NvmeStore() { io_thread_.Stop(); }

bool NvmeStore::pins_at_once() const {
  const absl::MutexLock lock(&monitor_.mu);
  return context_.frames() >= context_.records() && !committer_.is_flushing();
}

absl::Status NvmeStore::status() const {
  const absl::MutexLock lock(&monitor_.mu);
  return monitor_.failed;
}

absl::StatusOr<storage::StateStore::Pin> NvmeStore::PinRecord(size_t sub_group,
                                                              Access access) {
  return Take(static_cast<uint32_t>(sub_group), access, /*is_of_pass=*/false);
}

absl::StatusOr<storage::StateStore::Pin> NvmeStore::Take(uint32_t index,
                                                         Access access,
                                                         bool is_of_pass) {
  const absl::MutexLock lock(&monitor_.mu);
  RecordCache::Record& record = cache_.record(index);
  const bool overwrites = access == Access::kOverwrite;
  while (true) {
    OPTSTATE_RETURN_IF_ERROR(monitor_.failed);
    const uint32_t frame = cache_.place(index).frame;
    if (frame != RecordCache::kNoFrame) {
      if (cache_.MayPin(index, access)) {
        if (overwrites) record.is_overwritten = false;
        if (access != Access::kRead) parameters_.Drop(index);
        cache_.Pin(index, access, is_of_pass);
        return Pin(context_.record_layout.ViewOf(index, context_.FrameAt(frame),
                                                 arrays().parameters),
                   this, access);
      }
    } else if (record.loaded_frame != RecordCache::kNoFrame) {
      RecordCache::Frame& loaded = cache_.frame(record.loaded_frame);
      if (loaded.state == RecordCache::FrameState::kLoaded &&
          !loaded.is_checking) {
        if (overwrites) loaded.is_fresh = true;
        OPTSTATE_RETURN_IF_ERROR(
            checks_.Check(index, swapper_.reads_parameters()));
        continue;
      }
    } else if (!record.error.ok() && !overwrites) {
      return std::exchange(record.error, absl::OkStatus());
    } else {
      record.error = absl::OkStatus();
      if (overwrites) record.is_overwritten = true;
      if (queue_.Demand(index)) monitor_.Wake();
    }
    ++record.waiters;
    if (is_of_pass) monitor_.counters.BeginWait();
    monitor_.changed.Wait(&monitor_.mu);
    if (is_of_pass) monitor_.counters.EndWait();
    --record.waiters;
  }
}

// Says whether a record that the pass has changed is going to be written before
// it is changed again: its frame is wanted for another record, or each pass is
// made durable.
bool NvmeStore::WillBeWritten(uint32_t record) {
  if (!cache_.record(record).is_of_pass) return false;
  return queue_.NeedsFrames() ||
         (context_.options.is_durable && queue_.IsEachPassCommitted());
}

void NvmeStore::Unpin(const storage::RecordView& view, Access access) {
  const auto index =
      static_cast<uint32_t>(&view.sub_group() - sub_groups().all().data());
  const absl::MutexLock lock(&monitor_.mu);
  if (access != Access::kRead && cache_.record(index).pins == 1 &&
      WillBeWritten(index)) {
    const StoreCounters::CallerTimer timer(&monitor_.counters);
    checks_.Sum(cache_.place(index).frame);
  }
  if (cache_.Unpin(index)) monitor_.Wake();
}

absl::StatusOr<size_t> NvmeStore::BeginPass(absl::Span<const uint8_t> wanted) {
  const absl::MutexLock lock(&monitor_.mu);
  OPTSTATE_RETURN_IF_ERROR(monitor_.failed);
  const size_t records = queue_.BeginPass(wanted);
  monitor_.counters.OnPass();
  monitor_.io_counters.OnPass();
  monitor_.Wake();
  return records;
}

absl::StatusOr<storage::StateStore::Pin> NvmeStore::PinOfPass(size_t position) {
  uint32_t record;
  {
    const absl::MutexLock lock(&monitor_.mu);
    record = queue_.record_of_pass(position);
  }
  return Take(record, Access::kWrite, /*is_of_pass=*/true);
}

absl::Status NvmeStore::RequestCommit(uint64_t step, absl::string_view job) {
  return committer_.Request(step, job);
}

absl::Status NvmeStore::AwaitCommit() { return committer_.Await(); }

uint64_t NvmeStore::durable_step() const { return committer_.durable_step(); }

std::string NvmeStore::durable_job() const { return committer_.durable_job(); }

// A record that was never written is all zeros, which a frame gets without a
// read.
absl::Status NvmeStore::ReadSection(uint32_t record, ParameterCache::Use use) {
  bool in_frame = false;
  {
    const absl::MutexLock lock(&monitor_.mu);
    in_frame = cache_.IsInMemory(record) || !cache_.place(record).is_on_disk;
  }
  if (!in_frame) {
    OPTSTATE_ASSIGN_OR_RETURN(const bool done, parameters_.Read(record, use));
    if (done) return absl::OkStatus();
  }
  OPTSTATE_ASSIGN_OR_RETURN(const Pin pin, PinSubGroup(record, Access::kRead));
  use(pin.record());
  const absl::MutexLock lock(&monitor_.mu);
  parameters_.CountFromFrame();
  return absl::OkStatus();
}

absl::Status NvmeStore::ReadParameter(uint32_t parameter, uint64_t begin,
                                      uint64_t numel, std::byte* out) {
  if (!context_.holds_parameters()) {
    return storage::StateStore::ReadParameter(parameter, begin, numel, out);
  }
  const uint64_t bytes = SizeInBytes(layout().parameters()[parameter].dtype);
  const uint64_t flat = layout().flat_offset(parameter);
  for (const uint64_t end = begin + numel; begin < end;) {
    const uint32_t index = sub_groups().IndexOf(parameter, begin);
    const uint64_t part_end = std::min(end, sub_groups()[index].end - flat);
    const uint64_t part_bytes = (part_end - begin) * bytes;
    OPTSTATE_RETURN_IF_ERROR(
        ReadSection(index, [&](const storage::RecordView& record) {
          std::memcpy(out, record.parameter(parameter, begin), part_bytes);
        }));
    out += part_bytes;
    begin = part_end;
  }
  return absl::OkStatus();
}

void NvmeStore::ForEachRecordOf(
    uint32_t first, uint32_t count,
    absl::FunctionRef<void(uint32_t record)> visit) const {
  for (uint32_t p = first; p < first + count; ++p) {
    const auto numel = static_cast<uint64_t>(layout().parameters()[p].numel);
    if (numel == 0) continue;
    const uint32_t last = sub_groups().IndexOf(p, numel - 1);
    for (uint32_t i = sub_groups().IndexOf(p, 0); i <= last; ++i) visit(i);
  }
}

void NvmeStore::PrefetchParameters(uint32_t first, uint32_t count) {
  if (!context_.holds_parameters()) return;
  const absl::MutexLock lock(&monitor_.mu);
  ForEachRecordOf(first, count,
                  [this](uint32_t record) { parameters_.Prefetch(record); });
}

void NvmeStore::ReleaseParameters(uint32_t first, uint32_t count) {
  if (!context_.holds_parameters()) return;
  const absl::MutexLock lock(&monitor_.mu);
  ForEachRecordOf(first, count,
                  [this](uint32_t record) { parameters_.Release(record); });
}

absl::Status NvmeStore::RestoreParameters() {
  if (context_.holds_parameters()) return absl::OkStatus();
  {
    const absl::MutexLock lock(&monitor_.mu);
    swapper_.set_reads_parameters(true);
  }
  // A pass, so that the next records are read meanwhile.
  const std::vector<uint8_t> all(context_.records(), 1);
  absl::Status status = BeginPass(all).status();
  for (uint32_t i = 0; i < context_.records() && status.ok(); ++i) {
    status = Take(i, Access::kRead, /*is_of_pass=*/false).status();
  }
  const absl::MutexLock lock(&monitor_.mu);
  swapper_.set_reads_parameters(false);
  return status;
}

absl::Status NvmeStore::Vacate(uint32_t frames) {
  OPTSTATE_RETURN_IF_ERROR(committer_.Await());
  const absl::MutexLock lock(&monitor_.mu);
  cache_.SetVacatedFrom(frames);
  monitor_.Wake();
  while (swapper_.is_vacating() && monitor_.failed.ok()) {
    monitor_.changed.Wait(&monitor_.mu);
  }
  if (!monitor_.failed.ok()) cache_.SetVacatedFrom(RecordCache::kNoFrame);
  return monitor_.failed;
}

absl::Status NvmeStore::GiveUpFrames(uint32_t frames) {
  for (uint32_t i = 0; i < context_.records(); ++i) {
    RecordPlace place = context_.table.place(i);
    if (place.frame == RecordPlace::kNoFrame || place.frame < frames) continue;
    if (place.is_dirty) {
      return absl::InternalError(absl::StrCat(
          "record ", i, " was changed while its frame was given up"));
    }
    place.frame = RecordPlace::kNoFrame;
    context_.table.SetPlace(i, place);
  }
  storage::PersistInOrder(storage::PersistPoint::kFramesGivenUp);
  return absl::OkStatus();
}

absl::Status NvmeStore::ChangeFrames(
    uint32_t frames,
    absl::FunctionRef<absl::Status(absl::Span<std::byte>*)> resize) {
  OPTSTATE_RETURN_IF_ERROR(Vacate(frames));
  io_thread_.Stop();
  absl::Status changed = GiveUpFrames(frames);
  // The pages of what is cut off would stay in memory as long as they are
  // registered.
  context_.engine.RegisterMemory({});
  if (changed.ok()) changed = resize(&context_.frame_memory);
  context_.table.SetFrames(context_.frames());
  context_.engine.RegisterMemory(context_.frame_memory);
  {
    const absl::MutexLock lock(&monitor_.mu);
    cache_.Reset(context_.frames());
    checks_.Reset();
    swapper_.Reset();
  }
  mover_.Reset();
  io_thread_.Start();
  return changed;
}

absl::Status NvmeStore::BeginMove(const storage::RewriteTarget& target) {
  io_thread_.Stop();
  // A write that was in flight may have failed.
  absl::Status status = this->status();
  if (status.ok()) status = mover_.Begin(&target);
  io_thread_.Start();
  return status;
}

absl::Status NvmeStore::CopyRecords() { return mover_.Copy(); }

absl::StatusOr<uint64_t> NvmeStore::FinishMove(
    absl::FunctionRef<absl::Status()> commit) {
  absl::Status status = committer_.Await();
  // A verification may begin at any time, and names files and places.
  verifier_.Suspend();
  io_thread_.Stop();
  if (status.ok()) status = this->status();
  if (status.ok()) status = mover_.Seal();
  if (status.ok()) status = commit();
  const bool is_switched = status.ok();
  const uint64_t bytes = mover_.bytes();
  const storage::RewriteTarget* const target = mover_.target();
  mover_.End(/*is_adopted=*/is_switched);
  if (is_switched) {
    status = Reopen(*target);
    const absl::MutexLock lock(&monitor_.mu);
    if (!status.ok()) monitor_.Fail(status);
  }
  io_thread_.Start();
  verifier_.Resume();
  OPTSTATE_RETURN_IF_ERROR(status);
  return bytes;
}

void NvmeStore::CancelMove(const absl::Status& why) { mover_.Cancel(why); }

void NvmeStore::EndMove() {
  if (mover_.target() == nullptr) return;
  io_thread_.Stop();
  mover_.End(/*is_adopted=*/false);
  io_thread_.Start();
}

absl::StatusOr<uint64_t> NvmeStore::WriteAnew(
    const storage::RewriteTarget& target) {
  if (mover_.target() != nullptr) {
    return absl::FailedPreconditionError(
        "the job's records are being moved: end that first");
  }
  OPTSTATE_RETURN_IF_ERROR(Vacate(0));
  io_thread_.Stop();
  RecordRewriter rewriter(&context_, &target, committer_.last());
  const absl::Status status = Rewrite(&rewriter);
  {
    const absl::MutexLock lock(&monitor_.mu);
    cache_.SetVacatedFrom(RecordCache::kNoFrame);
  }
  io_thread_.Start();
  OPTSTATE_RETURN_IF_ERROR(status);
  return rewriter.bytes();
}

absl::Status NvmeStore::Rewrite(RecordRewriter* rewriter) {
  {
    const absl::MutexLock lock(&monitor_.mu);
    rewrite_began_at_ = std::chrono::steady_clock::now();
    rewriting_ = storage::RewriteState();
  }
  absl::Status status =
      rewriter->Write([this](uint64_t bytes, uint64_t bytes_total) {
        const absl::MutexLock lock(&monitor_.mu);
        rewriting_->bytes = bytes;
        rewriting_->bytes_total = bytes_total;
      });
  const absl::MutexLock lock(&monitor_.mu);
  rewriting_.reset();
  return status;
}

std::optional<storage::RewriteState> NvmeStore::rewriting() const {
  std::optional<storage::RewriteState> state = mover_.state();
  if (state.has_value()) return state;
  const absl::MutexLock lock(&monitor_.mu);
  state = rewriting_;
  if (state.has_value()) {
    state->elapsed =
        absl::FromChrono(std::chrono::steady_clock::now() - rewrite_began_at_);
  }
  return state;
}

void NvmeStore::RemoveAnew(const storage::Arrangement& arrangement) {
  // One thread at a time uses the engine.
  io_thread_.Stop();
  NextArrangement::Remove(&context_.engine, arrangement);
  io_thread_.Start();
}

absl::Status NvmeStore::Reopen(const storage::RewriteTarget& target) {
  context_.files->Close(&context_.engine);
  if (context_.log != nullptr) context_.engine.Close(context_.log->file());
  NvmeOptions& options = context_.options;
  options.directories = target.arrangement.directories;
  options.extents = target.arrangement.extents;
  options.weights = target.arrangement.weights;
  options.arrangement = target.arrangement.number;
  options.job_bytes = target.job_bytes;
  options.table = target.table;
  context_.table = FrameTable(target.table);
  OPTSTATE_RETURN_IF_ERROR(StoreOpener(&context_).Open(/*restored=*/nullptr));
  const absl::MutexLock lock(&monitor_.mu);
  monitor_.io_counters.Resize(options.directories.size());
  committer_.Adopt();
  return absl::OkStatus();
}

uint64_t NvmeStore::waited_ns() const {
  const absl::MutexLock lock(&monitor_.mu);
  return monitor_.counters.waited_ns();
}

std::optional<storage::SwapState> NvmeStore::swap_state() const {
  const absl::MutexLock lock(&monitor_.mu);
  storage::SwapState state{.io_engine = context_.engine.name(),
                           .counters = monitor_.counters.all(),
                           .directories = monitor_.io_counters.all(),
                           .records_to_write = committer_.records_to_flush() +
                                               swapper_.records_to_vacate(),
                           .parameter_cache = std::nullopt};
  if (context_.holds_parameters()) state.parameter_cache = parameters_.state();
  return state;
}

absl::StatusOr<storage::VerifyResult> NvmeStore::Verify(
    absl::FunctionRef<bool(const storage::VerifyResult&)> progress) {
  return verifier_.Verify(progress);
}

}  // namespace optstate::nvme
