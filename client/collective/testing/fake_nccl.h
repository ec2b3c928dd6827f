#ifndef OPTSTATE_CLIENT_COLLECTIVE_TESTING_FAKE_NCCL_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TESTING_FAKE_NCCL_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/collective/nccl/device_queue.h"

namespace optstate::client {

// The path of libfake_nccl.so, for tests that have it among their data.
inline constexpr char kFakeNcclPath[] =
    "client/collective/testing/libfake_nccl.so";

// Controls libfake_nccl.so: a library with NCCL's interface whose ranks are
// threads of one process, and whose device memory is the host's.
//
// A collective call is done once every rank of its communicator has made it, by
// the last one; sums are made in the order of the ranks. Calls of one place in
// the order that differ between ranks never end, as with NCCL. An aborted
// communicator takes its calls back, and the other ranks' never end, or end in
// ncclRemoteError when that was asked for.
//
// Threads: thread-safe.
class FakeNccl {
 public:
  // Opens the library and resets it.
  static absl::StatusOr<FakeNccl> Open();

  // Forgets all faults and the log. Communicators of former tests are over.
  void Reset() const { reset_(); }
  // Has the next call of `function` ("ncclAllReduce") by this rank return
  // `result`, without doing anything.
  void FailCall(const char* function, int rank, int result) const {
    fail_call_(function, rank, result);
  }
  // Has the communicators of this rank report an asynchronous error once they
  // have a call under way.
  void FailAsync(int rank, int result) const { fail_async_(rank, result); }
  // Has the calls of this rank never reach the others.
  void Hang(int rank) const { hang_(rank); }
  // Has an aborted communicator end the calls of other ranks.
  void TellOfAborts() const { tell_of_aborts_(); }
  // Has ncclGetVersion return this.
  void SetVersion(int version) const { set_version_(version); }
  // Returns the communicators that were made, and not destroyed or aborted.
  int OpenCommunicators() const { return open_communicators_(); }
  // Returns all calls by this rank, in order: "ncclAllReduce count=3 type=7
  // op=0", "ncclBroadcast count=3 type=1 root=2", "ncclCommAbort".
  std::vector<std::string> Calls(int rank) const;

  // Makes a queue whose stream is the fake's. `refused`: an address that the
  // device does not reach, or null.
  std::unique_ptr<DeviceQueue> MakeQueue(const void* refused = nullptr) const;

 private:
  FakeNccl() = default;

  void (*reset_)() = nullptr;
  void (*fail_call_)(const char* function, int rank, int result) = nullptr;
  void (*fail_async_)(int rank, int result) = nullptr;
  void (*hang_)(int rank) = nullptr;
  void (*tell_of_aborts_)() = nullptr;
  void (*set_version_)(int version) = nullptr;
  int (*open_communicators_)() = nullptr;
  // Copies the rank's calls, a line each, and returns the size of all of them.
  size_t (*calls_)(int rank, char* text, size_t size) = nullptr;
  // Returns whether no call of the stream is under way.
  int (*stream_is_done_)(void* stream) = nullptr;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TESTING_FAKE_NCCL_H_
