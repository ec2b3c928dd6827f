#include "client/collective/nccl/nccl_collective.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/collective/collective_base.h"
#include "client/collective/nccl/nccl_library.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr size_t kNameBytesMax = 60;
constexpr absl::string_view kForm = "optstate-nccl-1";
// The pause between two looks at an operation.
constexpr absl::Duration kPauseMin = absl::Microseconds(20);
constexpr absl::Duration kPauseMax = absl::Milliseconds(1);
// The wait for the other ranks when the communicator is taken down.
constexpr absl::Duration kFinalizeMax = absl::Seconds(10);

nccl::DataType ToNccl(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return nccl::kFloat32;
    case ElementType::kBFloat16:
      return nccl::kBfloat16;
    case ElementType::kFloat64:
      return nccl::kFloat64;
    case ElementType::kUint8:
      break;
  }
  return nccl::kUint8;
}

bool IsError(nccl::Result result) {
  return result != nccl::kSuccess && result != nccl::kInProgress;
}

// The key's value: the form, the world size, and the id in hexadecimal.
std::string IdRecord(uint32_t world_size, const nccl::UniqueId& id) {
  return absl::StrCat(kForm, " ", world_size, " ",
                      absl::BytesToHexString(
                          absl::string_view(id.internal, sizeof(id.internal))));
}

absl::StatusOr<nccl::UniqueId> ParseId(absl::string_view text,
                                       uint32_t world_size) {
  const std::vector<absl::string_view> fields = absl::StrSplit(text, ' ');
  nccl::UniqueId id = {};
  uint32_t theirs = 0;
  const auto is_hex = [](char each) {
    return absl::ascii_isxdigit(static_cast<unsigned char>(each));
  };
  if (fields.size() != 3 || fields[0] != kForm ||
      !absl::SimpleAtoi(fields[1], &theirs) ||
      fields[2].size() != 2 * sizeof(id.internal) ||
      !std::all_of(fields[2].begin(), fields[2].end(), is_hex)) {
    return absl::DataLossError(
        "the id of the communicator was not written by a rank of this build: "
        "give the run a fresh name, and all ranks the same build");
  }
  if (theirs != world_size) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank 0 was told that there are ", theirs,
                     " ranks, this rank that there are ", world_size,
                     ": give all ranks the same world_size"));
  }
  const std::string bytes = absl::HexStringToBytes(fields[2]);
  std::copy(bytes.begin(), bytes.end(), id.internal);
  return id;
}

class NcclCollective final : public CollectiveBase {
 public:
  NcclCollective(const NcclOptions& options, nccl::Library library,
                 std::unique_ptr<DeviceQueue> queue)
      : CollectiveBase(options.rank, options.world_size),
        options_(options),
        library_(std::move(library)),
        queue_(std::move(queue)) {}
  ~NcclCollective() override;
  NcclCollective(const NcclCollective&) = delete;
  NcclCollective& operator=(const NcclCollective&) = delete;

  absl::string_view name() const override { return "nccl"; }
  MemoryKind memory() const override { return MemoryKind::kDevice; }

  absl::Status Connect(Store* store);

 protected:
  absl::Status RunAllReduce(ElementType type,
                            absl::Span<const SumBuffers> buffers) override;
  absl::Status RunReduceScatter(ElementType type,
                                absl::Span<const std::byte> in,
                                absl::Span<std::byte> out) override;
  absl::Status RunReduce(ElementType type, uint32_t root,
                         absl::Span<const std::byte> in,
                         absl::Span<std::byte> out) override;
  absl::Status RunAllGather(absl::Span<const std::byte> in,
                            absl::Span<std::byte> out) override;
  absl::Status RunBroadcast(uint32_t root,
                            absl::Span<std::byte> buffer) override;
  absl::Status RunBarrier() override;
  // Both ends: a registration may be shorter than the buffer.
  absl::Status CheckMemory(absl::Span<const std::byte> buffer) override {
    return queue_->WithDevice([&]() -> absl::Status {
      OPTSTATE_RETURN_IF_ERROR(queue_->CheckMemory(buffer.data()));
      return queue_->CheckMemory(buffer.data() + buffer.size() - 1);
    });
  }
  void Wake() override { is_woken_ = true; }
  void Leave(const absl::Status& why) override;

 private:
  using Issue = absl::FunctionRef<nccl::Result()>;
  using Done = absl::FunctionRef<absl::StatusOr<bool>()>;

  const nccl::Api& api() const { return library_.api(); }
  absl::StatusOr<nccl::UniqueId> ExchangeId(Store* store, absl::Time deadline);
  // Issues a call, and waits until the stream has done it.
  absl::Status Do(absl::string_view call, Issue issue);
  // Waits until NCCL has nothing under way in the background and `done` says
  // yes.
  absl::Status Await(absl::string_view call, absl::Time deadline, Done done);

  const NcclOptions options_;
  const nccl::Library library_;
  const std::unique_ptr<DeviceQueue> queue_;
  nccl::Comm comm_ = nullptr;  // null: not made yet, or aborted
  uint64_t sequence_ = 0;      // of the last operation
  std::atomic<bool> is_woken_ = false;
};

NcclCollective::~NcclCollective() {
  if (comm_ == nullptr) return;
  const absl::Status ended = queue_->WithDevice([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(library_.ToStatus(api().CommFinalize(comm_),
                                               "ncclCommFinalize", comm_));
    OPTSTATE_RETURN_IF_ERROR(
        Await("ncclCommFinalize",
              absl::Now() + std::min(options_.timeout, kFinalizeMax),
              []() -> absl::StatusOr<bool> { return true; }));
    // Even a call that fails may have freed it, so it is not aborted after
    // that.
    return library_.ToStatus(api().CommDestroy(std::exchange(comm_, nullptr)),
                             "ncclCommDestroy", nullptr);
  });
  if (!ended.ok()) Leave(ended);
}

void NcclCollective::Leave(const absl::Status&) {
  if (comm_ == nullptr) return;
  queue_
      ->WithDevice([&] {
        return library_.ToStatus(api().CommAbort(comm_), "ncclCommAbort",
                                 nullptr);
      })
      .IgnoreError();  // the error that led here says more
  comm_ = nullptr;
}

absl::Status NcclCollective::Await(absl::string_view call, absl::Time deadline,
                                   Done done) {
  absl::Duration pause = kPauseMin;
  while (true) {
    if (is_woken_) return absl::AbortedError("this rank has aborted");
    nccl::Result state = nccl::kSuccess;
    OPTSTATE_RETURN_IF_ERROR(
        library_.ToStatus(api().CommGetAsyncError(comm_, &state),
                          "ncclCommGetAsyncError", comm_));
    OPTSTATE_RETURN_IF_ERROR(library_.ToStatus(state, call, comm_));
    if (state == nccl::kSuccess) {
      OPTSTATE_ASSIGN_OR_RETURN(const bool is_done, done());
      if (is_done) return absl::OkStatus();
    }
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", rank(), " has waited in ", call, " (operation ", sequence_,
          ") for the time-out: another rank has not made this call, has ended, "
          "or cannot be reached"));
    }
    absl::SleepFor(pause);
    pause = std::min(2 * pause, kPauseMax);
  }
}

absl::StatusOr<nccl::UniqueId> NcclCollective::ExchangeId(Store* store,
                                                          absl::Time deadline) {
  const std::string key = absl::StrCat(options_.name, "-nccl");
  if (rank() == 0) {
    nccl::UniqueId id = {};
    OPTSTATE_RETURN_IF_ERROR(
        library_.ToStatus(api().GetUniqueId(&id), "ncclGetUniqueId", nullptr));
    OPTSTATE_RETURN_IF_ERROR(store->Set(key, IdRecord(world_size(), id)));
    return id;
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::string text, store->Get(key, deadline));
  return ParseId(text, world_size());
}

absl::Status NcclCollective::Connect(Store* store) {
  const absl::Time deadline = absl::Now() + options_.connect_timeout;
  absl::Status status = queue_->WithDevice([&]() -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(const nccl::UniqueId id,
                              ExchangeId(store, deadline));
    nccl::Config config;
    OPTSTATE_RETURN_IF_ERROR(library_.ToStatus(
        api().CommInitRankConfig(&comm_, static_cast<int>(world_size()), id,
                                 static_cast<int>(rank()), &config),
        "ncclCommInitRankConfig", nullptr));
    return Await("ncclCommInitRankConfig", deadline,
                 []() -> absl::StatusOr<bool> { return true; });
  });
  if (!status.ok()) Leave(status);
  return status;
}

absl::Status NcclCollective::Do(absl::string_view call, Issue issue) {
  const absl::Time deadline = absl::Now() + options_.timeout;
  ++sequence_;
  return queue_->WithDevice([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(library_.ToStatus(issue(), call, comm_));
    return Await(call, deadline, [&] { return queue_->IsDone(); });
  });
}

absl::Status NcclCollective::RunAllReduce(
    ElementType type, absl::Span<const SumBuffers> buffers) {
  return Do("ncclAllReduce", [&] {
    const nccl::Result begun = api().GroupStart();
    if (IsError(begun)) return begun;
    nccl::Result first = nccl::kSuccess;
    for (const SumBuffers& each : buffers) {
      if (each.in.empty()) continue;
      first = api().AllReduce(each.in.data(), each.out.data(),
                              each.in.size() / SizeInBytes(type), ToNccl(type),
                              nccl::kSum, comm_, queue_->stream());
      if (IsError(first)) break;
    }
    const nccl::Result ended = api().GroupEnd();
    return IsError(first) ? first : ended;
  });
}

absl::Status NcclCollective::RunReduceScatter(ElementType type,
                                              absl::Span<const std::byte> in,
                                              absl::Span<std::byte> out) {
  return Do("ncclReduceScatter", [&] {
    if (out.empty()) return nccl::kSuccess;
    return api().ReduceScatter(in.data(), out.data(),
                               out.size() / SizeInBytes(type), ToNccl(type),
                               nccl::kSum, comm_, queue_->stream());
  });
}

absl::Status NcclCollective::RunReduce(ElementType type, uint32_t root,
                                       absl::Span<const std::byte> in,
                                       absl::Span<std::byte> out) {
  return Do("ncclReduce", [&] {
    if (in.empty()) return nccl::kSuccess;
    return api().Reduce(in.data(), rank() == root ? out.data() : nullptr,
                        in.size() / SizeInBytes(type), ToNccl(type), nccl::kSum,
                        static_cast<int>(root), comm_, queue_->stream());
  });
}

absl::Status NcclCollective::RunAllGather(absl::Span<const std::byte> in,
                                          absl::Span<std::byte> out) {
  return Do("ncclAllGather", [&] {
    if (in.empty()) return nccl::kSuccess;
    return api().AllGather(in.data(), out.data(), in.size(), nccl::kUint8,
                           comm_, queue_->stream());
  });
}

absl::Status NcclCollective::RunBroadcast(uint32_t root,
                                          absl::Span<std::byte> buffer) {
  return Do("ncclBroadcast", [&] {
    if (buffer.empty()) return nccl::kSuccess;
    return api().Broadcast(buffer.data(), buffer.data(), buffer.size(),
                           nccl::kUint8, static_cast<int>(root), comm_,
                           queue_->stream());
  });
}

absl::Status NcclCollective::RunBarrier() {
  return Do("ncclAllReduce", [&] {
    return api().AllReduce(queue_->scratch(), queue_->scratch(), 1,
                           nccl::kUint8, nccl::kSum, comm_, queue_->stream());
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeNcclCollective(
    const NcclOptions& options, Store* store,
    std::unique_ptr<DeviceQueue> queue) {
  if (options.world_size == 0 || options.rank >= options.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", options.rank, " of ", options.world_size, " ranks"));
  }
  if (options.name.empty() || options.name.size() > kNameBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of the run has 1 to ", kNameBytesMax,
                     " bytes, not ", options.name.size()));
  }
  OPTSTATE_ASSIGN_OR_RETURN(nccl::Library library,
                            nccl::Library::Open(options.library));
  auto collective = std::make_unique<NcclCollective>(
      options, std::move(library), std::move(queue));
  const absl::Status connected = collective->Connect(store);
  if (!connected.ok()) {
    return Annotate(connected,
                    absl::StrCat("collective \"", options.name, "\""));
  }
  return std::unique_ptr<Collective>(std::move(collective));
}

}  // namespace optstate::client
