// libfake_nccl.so: NCCL's interface over FakeCommunicators.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "client/collective/nccl/nccl_api.h"
#include "client/collective/testing/fake_communicators.h"

namespace {

namespace nccl = optstate::client::nccl;
using optstate::client::FakeCall;
using optstate::client::FakeCommunicators;

FakeCommunicators& Instance() { return FakeCommunicators::Instance(); }

// The calls between ncclGroupStart and ncclGroupEnd of a thread.
struct ThreadGroup {
  int depth = 0;
  std::vector<std::pair<nccl::Comm, FakeCall>> calls;
};
thread_local ThreadGroup thread_group;

nccl::Result CallOrQueue(nccl::Comm comm, FakeCall call) {
  if (thread_group.depth == 0) return Instance().Call(comm, std::move(call));
  thread_group.calls.emplace_back(comm, std::move(call));
  return nccl::kSuccess;
}

}  // namespace

#define OPTSTATE_FAKE_NCCL_EXPORT \
  extern "C" __attribute__((visibility("default")))

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclGetVersion(int* version) {
  *version = Instance().version();
  return nccl::kSuccess;
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclGetUniqueId(nccl::UniqueId* id) {
  Instance().GetUniqueId(id);
  return nccl::kSuccess;
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclCommInitRankConfig(
    nccl::Comm* comm, int ranks, nccl::UniqueId id, int rank,
    nccl::Config* config) {
  const nccl::Config expected;
  if (config->size != expected.size || config->magic != expected.magic ||
      config->version != expected.version || config->blocking != 0) {
    return nccl::kInvalidArgument;
  }
  return Instance().Init(id, ranks, rank, comm);
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclCommFinalize(nccl::Comm comm) {
  return Instance().Finalize(comm);
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclCommDestroy(nccl::Comm comm) {
  return Instance().Destroy(comm);
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclCommAbort(nccl::Comm comm) {
  return Instance().Abort(comm);
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclCommGetAsyncError(
    nccl::Comm comm, nccl::Result* error) {
  return Instance().GetAsyncError(comm, error);
}

OPTSTATE_FAKE_NCCL_EXPORT const char* ncclGetErrorString(nccl::Result result) {
  return result == nccl::kRemoteError ? "remote process exited or there was a "
                                        "network error"
                                      : "an error of the fake";
}

OPTSTATE_FAKE_NCCL_EXPORT const char* ncclGetLastError(nccl::Comm) {
  return "";
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclAllReduce(
    const void* send, void* receive, size_t count, nccl::DataType type,
    nccl::RedOp op, nccl::Comm comm, nccl::CudaStream stream) {
  return CallOrQueue(comm, {.function = "ncclAllReduce",
                            .send = send,
                            .receive = receive,
                            .count = count,
                            .type = type,
                            .op = op,
                            .root = -1,
                            .stream = stream});
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclReduceScatter(
    const void* send, void* receive, size_t receive_count, nccl::DataType type,
    nccl::RedOp op, nccl::Comm comm, nccl::CudaStream stream) {
  return CallOrQueue(comm, {.function = "ncclReduceScatter",
                            .send = send,
                            .receive = receive,
                            .count = receive_count,
                            .type = type,
                            .op = op,
                            .root = -1,
                            .stream = stream});
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclReduce(
    const void* send, void* receive, size_t count, nccl::DataType type,
    nccl::RedOp op, int root, nccl::Comm comm, nccl::CudaStream stream) {
  return CallOrQueue(comm, {.function = "ncclReduce",
                            .send = send,
                            .receive = receive,
                            .count = count,
                            .type = type,
                            .op = op,
                            .root = root,
                            .stream = stream});
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclAllGather(
    const void* send, void* receive, size_t send_count, nccl::DataType type,
    nccl::Comm comm, nccl::CudaStream stream) {
  return CallOrQueue(comm, {.function = "ncclAllGather",
                            .send = send,
                            .receive = receive,
                            .count = send_count,
                            .type = type,
                            .op = nccl::kSum,
                            .root = -1,
                            .stream = stream});
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclBroadcast(
    const void* send, void* receive, size_t count, nccl::DataType type,
    int root, nccl::Comm comm, nccl::CudaStream stream) {
  return CallOrQueue(comm, {.function = "ncclBroadcast",
                            .send = send,
                            .receive = receive,
                            .count = count,
                            .type = type,
                            .op = nccl::kSum,
                            .root = root,
                            .stream = stream});
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclGroupStart() {
  ++thread_group.depth;
  return nccl::kSuccess;
}

OPTSTATE_FAKE_NCCL_EXPORT nccl::Result ncclGroupEnd() {
  if (thread_group.depth == 0) return nccl::kInvalidUsage;
  if (--thread_group.depth > 0) return nccl::kSuccess;
  nccl::Result first = nccl::kSuccess;
  for (auto& [comm, call] : std::exchange(thread_group.calls, {})) {
    const nccl::Result result = Instance().Call(comm, std::move(call));
    const bool is_error =
        result != nccl::kSuccess && result != nccl::kInProgress;
    if (is_error) return result;
    first = result;
  }
  return first;
}

OPTSTATE_FAKE_NCCL_EXPORT void fakeNcclReset() { Instance().Reset(); }

OPTSTATE_FAKE_NCCL_EXPORT void fakeNcclFailCall(const char* function, int rank,
                                                int result) {
  Instance().FailCall(function, rank, result);
}

OPTSTATE_FAKE_NCCL_EXPORT void fakeNcclFailAsync(int rank, int result) {
  Instance().FailAsync(rank, result);
}

OPTSTATE_FAKE_NCCL_EXPORT void fakeNcclHang(int rank) { Instance().Hang(rank); }

OPTSTATE_FAKE_NCCL_EXPORT void fakeNcclTellOfAborts() {
  Instance().TellOfAborts();
}

OPTSTATE_FAKE_NCCL_EXPORT void fakeNcclSetVersion(int version) {
  Instance().SetVersion(version);
}

OPTSTATE_FAKE_NCCL_EXPORT int fakeNcclOpenCommunicators() {
  return Instance().OpenCommunicators();
}

OPTSTATE_FAKE_NCCL_EXPORT size_t fakeNcclCalls(int rank, char* text,
                                               size_t size) {
  const std::string calls = Instance().Calls(rank);
  if (size > 0) std::memcpy(text, calls.data(), std::min(size, calls.size()));
  return calls.size();
}

OPTSTATE_FAKE_NCCL_EXPORT int fakeNcclStreamIsDone(void* stream) {
  return Instance().IsStreamDone(stream) ? 1 : 0;
}
