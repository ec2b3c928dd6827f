#ifndef OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_API_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_API_H_

#include <cstddef>

namespace optstate::client::nccl {

// The part of NCCL's C interface that is used here, declared without its
// header, which machines that build this need not have. Names and values are
// those of nccl.h, without the prefix; NCCL keeps them within its major
// version 2, whose library is libnccl.so.2.

// An opaque communicator.
using Comm = void*;
using CudaStream = void*;

// NCCL passes enumerations as int.
using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kUnhandledCudaError = 1;
inline constexpr Result kSystemError = 2;
inline constexpr Result kInternalError = 3;
inline constexpr Result kInvalidArgument = 4;
inline constexpr Result kInvalidUsage = 5;
inline constexpr Result kRemoteError = 6;
inline constexpr Result kInProgress = 7;

using DataType = int;
inline constexpr DataType kUint8 = 1;
inline constexpr DataType kFloat32 = 7;
inline constexpr DataType kFloat64 = 8;
inline constexpr DataType kBfloat16 = 9;

using RedOp = int;
inline constexpr RedOp kSum = 0;

struct UniqueId {
  char internal[128];
};
static_assert(sizeof(UniqueId) == 128);

// ncclConfig_t as version 2.14 had it. Later versions append fields, and take
// the size and version for what the caller knows.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};
static_assert(sizeof(Config) == 24);
static_assert(offsetof(Config, blocking) == 16);

// The oldest version with ncclCommInitRankConfig and non-blocking
// communicators, and the first one that may have another interface. Coded as
// major * 10000 + minor * 100 + patch.
inline constexpr int kVersionMin = 21400;
inline constexpr int kVersionEnd = 30000;

// The functions, by their names in NCCL.
struct Api {
  Result (*GetVersion)(int* version);
  Result (*GetUniqueId)(UniqueId* id);
  Result (*CommInitRankConfig)(Comm* comm, int ranks, UniqueId id, int rank,
                               Config* config);
  Result (*CommFinalize)(Comm comm);
  Result (*CommDestroy)(Comm comm);
  Result (*CommAbort)(Comm comm);
  Result (*CommGetAsyncError)(Comm comm, Result* error);
  const char* (*GetErrorString)(Result result);
  const char* (*GetLastError)(Comm comm);
  Result (*AllReduce)(const void* send, void* receive, size_t count,
                      DataType type, RedOp op, Comm comm, CudaStream stream);
  Result (*ReduceScatter)(const void* send, void* receive, size_t receive_count,
                          DataType type, RedOp op, Comm comm,
                          CudaStream stream);
  Result (*Reduce)(const void* send, void* receive, size_t count, DataType type,
                   RedOp op, int root, Comm comm, CudaStream stream);
  Result (*AllGather)(const void* send, void* receive, size_t send_count,
                      DataType type, Comm comm, CudaStream stream);
  Result (*Broadcast)(const void* send, void* receive, size_t count,
                      DataType type, int root, Comm comm, CudaStream stream);
  Result (*GroupStart)();
  Result (*GroupEnd)();
};

}  // namespace optstate::client::nccl

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_API_H_
