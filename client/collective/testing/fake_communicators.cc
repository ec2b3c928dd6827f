#include "client/collective/testing/fake_communicators.h"

#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/collective/sum.h"

namespace optstate::client {
namespace {

// A version like those of today.
constexpr int kDefaultVersion = 22809;

ElementType FromNccl(nccl::DataType type) {
  switch (type) {
    case nccl::kFloat32:
      return ElementType::kFloat32;
    case nccl::kBfloat16:
      return ElementType::kBFloat16;
    case nccl::kFloat64:
      return ElementType::kFloat64;
    default:
      return ElementType::kUint8;
  }
}

std::string KeyOf(const nccl::UniqueId& id) {
  return std::string(id.internal, sizeof(id.internal));
}

// Adds up `count` elements of each call's input from element `begin` on.
void Sum(const std::map<int, FakeCall>& calls, size_t begin, size_t count,
         std::byte* out) {
  const ElementType type = FromNccl(calls.begin()->second.type);
  std::vector<const std::byte*> arrays;
  arrays.reserve(calls.size());
  for (const auto& [rank, call] : calls) {
    arrays.push_back(static_cast<const std::byte*>(call.send) +
                     begin * SizeInBytes(type));
  }
  SumInOrder(type, arrays, count, out);
}

}  // namespace

std::string FakeCall::Describe() const {
  std::string text = absl::StrCat(function, " count=", count, " type=", type);
  if (root >= 0) {
    absl::StrAppend(&text, " root=", root);
  } else if (function != "ncclAllGather") {
    absl::StrAppend(&text, " op=", op);
  }
  return text;
}

bool FakeCall::Fits(const FakeCall& other) const {
  return function == other.function && count == other.count &&
         type == other.type && op == other.op && root == other.root;
}

FakeCommunicators& FakeCommunicators::Instance() {
  static auto* const instance = new FakeCommunicators();
  return *instance;
}

int FakeCommunicators::version() const {
  absl::MutexLock lock(&mutex_);
  return version_ == 0 ? kDefaultVersion : version_;
}

void FakeCommunicators::GetUniqueId(nccl::UniqueId* id) {
  absl::MutexLock lock(&mutex_);
  ++last_id_;
  std::memset(id->internal, 0, sizeof(id->internal));
  std::memcpy(id->internal, &last_id_, sizeof(last_id_));
}

nccl::Result FakeCommunicators::Note(const std::string& function,
                                     const std::string& text, int rank) {
  absl::StrAppend(&log_[rank], text, "\n");
  const auto found = failing_calls_.find({function, rank});
  if (found == failing_calls_.end()) return nccl::kSuccess;
  const nccl::Result result = found->second;
  failing_calls_.erase(found);
  return result;
}

nccl::Result FakeCommunicators::Init(const nccl::UniqueId& id, int ranks,
                                     int rank, nccl::Comm* comm) {
  absl::MutexLock lock(&mutex_);
  const nccl::Result injected =
      Note("ncclCommInitRankConfig",
           absl::StrCat("ncclCommInitRankConfig ranks=", ranks), rank);
  if (injected != nccl::kSuccess) return injected;
  std::shared_ptr<Group>& group = groups_[KeyOf(id)];
  if (group == nullptr) {
    group = std::make_shared<Group>();
    group->ranks = ranks;
  }
  if (group->ranks != ranks || !group->joined.insert(rank).second) {
    return nccl::kInvalidArgument;
  }
  auto made = std::make_unique<Communicator>();
  made->group = group;
  made->rank = rank;
  *comm = made.get();
  communicators_[*comm] = std::move(made);
  return nccl::kInProgress;
}

FakeCommunicators::Communicator* FakeCommunicators::Find(nccl::Comm comm) {
  const auto found = communicators_.find(comm);
  return found == communicators_.end() ? nullptr : found->second.get();
}

nccl::Result FakeCommunicators::Finalize(nccl::Comm comm) {
  absl::MutexLock lock(&mutex_);
  Communicator* const communicator = Find(comm);
  if (communicator == nullptr) return nccl::kInvalidArgument;
  return Note("ncclCommFinalize", "ncclCommFinalize", communicator->rank);
}

nccl::Result FakeCommunicators::Destroy(nccl::Comm comm) {
  absl::MutexLock lock(&mutex_);
  Communicator* const communicator = Find(comm);
  if (communicator == nullptr) return nccl::kInvalidArgument;
  const nccl::Result result =
      Note("ncclCommDestroy", "ncclCommDestroy", communicator->rank);
  communicators_.erase(comm);
  return result;
}

void FakeCommunicators::TakeBack(Communicator* communicator) {
  for (auto& [place, calls] : communicator->group->waiting) {
    const auto found = calls.find(communicator->rank);
    if (found == calls.end()) continue;
    --under_way_[found->second.stream];
    calls.erase(found);
  }
}

nccl::Result FakeCommunicators::Abort(nccl::Comm comm) {
  absl::MutexLock lock(&mutex_);
  Communicator* const communicator = Find(comm);
  // NCCL has freed it, and would write to memory of others.
  if (communicator == nullptr) std::abort();
  const nccl::Result result =
      Note("ncclCommAbort", "ncclCommAbort", communicator->rank);
  TakeBack(communicator);
  // A rank that makes its call later would wait for this one for ever.
  if (tells_of_aborts_) {
    for (auto& [other, each] : communicators_) {
      if (each->group == communicator->group) each->is_lost = true;
    }
  }
  communicators_.erase(comm);
  return result;
}

nccl::Result FakeCommunicators::GetAsyncError(nccl::Comm comm,
                                              nccl::Result* error) {
  absl::MutexLock lock(&mutex_);
  Communicator* const communicator = Find(comm);
  if (communicator == nullptr) return nccl::kInvalidArgument;
  const Group& group = *communicator->group;
  const auto injected = async_errors_.find(communicator->rank);
  if (injected != async_errors_.end() && communicator->calls > 0) {
    *error = injected->second;
  } else if (communicator->is_lost) {
    *error = nccl::kRemoteError;
  } else if (group.joined.size() < static_cast<size_t>(group.ranks)) {
    *error = nccl::kInProgress;
  } else {
    *error = nccl::kSuccess;
  }
  return nccl::kSuccess;
}

nccl::Result FakeCommunicators::Call(nccl::Comm comm, FakeCall call) {
  absl::MutexLock lock(&mutex_);
  Communicator* const communicator = Find(comm);
  if (communicator == nullptr) return nccl::kInvalidArgument;
  const int rank = communicator->rank;
  const nccl::Result injected = Note(call.function, call.Describe(), rank);
  if (injected != nccl::kSuccess) return injected;
  const uint64_t place = communicator->calls++;
  ++under_way_[call.stream];
  Group& group = *communicator->group;
  std::map<int, FakeCall>& calls = group.waiting[place];
  calls[rank] = std::move(call);
  if (hanging_.count(rank) > 0) return nccl::kInProgress;
  if (calls.size() < static_cast<size_t>(group.ranks)) {
    return nccl::kInProgress;
  }
  for (const auto& [other, each] : calls) {
    // Ranks that make different calls hang.
    if (!each.Fits(calls.begin()->second) || hanging_.count(other) > 0) {
      return nccl::kInProgress;
    }
  }
  Perform(calls);
  for (const auto& [other, each] : calls) --under_way_[each.stream];
  group.waiting.erase(place);
  return nccl::kInProgress;
}

void FakeCommunicators::Perform(const std::map<int, FakeCall>& calls) {
  const FakeCall& first = calls.begin()->second;
  const size_t size = SizeInBytes(FromNccl(first.type));
  const size_t bytes = first.count * size;
  if (first.function == "ncclAllReduce" || first.function == "ncclReduce") {
    std::vector<std::byte> sum(bytes);
    Sum(calls, 0, first.count, sum.data());
    for (const auto& [rank, call] : calls) {
      if (call.root >= 0 && call.root != rank) continue;
      std::memcpy(call.receive, sum.data(), bytes);
    }
  } else if (first.function == "ncclReduceScatter") {
    std::vector<std::byte> sum(bytes * calls.size());
    Sum(calls, 0, first.count * calls.size(), sum.data());
    for (const auto& [rank, call] : calls) {
      std::memcpy(call.receive, sum.data() + rank * bytes, bytes);
    }
  } else if (first.function == "ncclAllGather") {
    std::vector<std::byte> all(bytes * calls.size());
    for (const auto& [rank, call] : calls) {
      std::memcpy(all.data() + rank * bytes, call.send, bytes);
    }
    for (const auto& [rank, call] : calls) {
      std::memcpy(call.receive, all.data(), all.size());
    }
  } else {  // ncclBroadcast
    const void* const from = calls.at(first.root).send;
    for (const auto& [rank, call] : calls) {
      if (call.receive != from) std::memcpy(call.receive, from, bytes);
    }
  }
}

void FakeCommunicators::Reset() {
  absl::MutexLock lock(&mutex_);
  failing_calls_.clear();
  async_errors_.clear();
  hanging_.clear();
  tells_of_aborts_ = false;
  version_ = 0;
  log_.clear();
}

void FakeCommunicators::FailCall(const std::string& function, int rank,
                                 nccl::Result result) {
  absl::MutexLock lock(&mutex_);
  failing_calls_[{function, rank}] = result;
}

void FakeCommunicators::FailAsync(int rank, nccl::Result result) {
  absl::MutexLock lock(&mutex_);
  async_errors_[rank] = result;
}

void FakeCommunicators::Hang(int rank) {
  absl::MutexLock lock(&mutex_);
  hanging_.insert(rank);
}

void FakeCommunicators::TellOfAborts() {
  absl::MutexLock lock(&mutex_);
  tells_of_aborts_ = true;
}

void FakeCommunicators::SetVersion(int version) {
  absl::MutexLock lock(&mutex_);
  version_ = version;
}

int FakeCommunicators::OpenCommunicators() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(communicators_.size());
}

std::string FakeCommunicators::Calls(int rank) const {
  absl::MutexLock lock(&mutex_);
  const auto found = log_.find(rank);
  return found == log_.end() ? "" : found->second;
}

bool FakeCommunicators::IsStreamDone(void* stream) const {
  absl::MutexLock lock(&mutex_);
  const auto found = under_way_.find(stream);
  return found == under_way_.end() || found->second == 0;
}

}  // namespace optstate::client
