#ifndef OPTSTATE_CLIENT_COLLECTIVE_TESTING_FAKE_COMMUNICATORS_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TESTING_FAKE_COMMUNICATORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/collective/nccl/nccl_api.h"

namespace optstate::client {

// One collective call of one rank.
struct FakeCall {
  std::string function;
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  nccl::DataType type = nccl::kUint8;
  nccl::RedOp op = nccl::kSum;
  int root = -1;
  void* stream = nullptr;

  std::string Describe() const;
  // Returns whether all ranks may make these calls together.
  bool Fits(const FakeCall& other) const;
};

// The communicators of libfake_nccl.so; see FakeNccl.
//
// Threads: thread-safe.
class FakeCommunicators {
 public:
  static FakeCommunicators& Instance();

  // NCCL's calls.
  int version() const ABSL_LOCKS_EXCLUDED(mutex_);
  void GetUniqueId(nccl::UniqueId* id) ABSL_LOCKS_EXCLUDED(mutex_);
  nccl::Result Init(const nccl::UniqueId& id, int ranks, int rank,
                    nccl::Comm* comm) ABSL_LOCKS_EXCLUDED(mutex_);
  nccl::Result Finalize(nccl::Comm comm) ABSL_LOCKS_EXCLUDED(mutex_);
  nccl::Result Destroy(nccl::Comm comm) ABSL_LOCKS_EXCLUDED(mutex_);
  nccl::Result Abort(nccl::Comm comm) ABSL_LOCKS_EXCLUDED(mutex_);
  nccl::Result GetAsyncError(nccl::Comm comm, nccl::Result* error)
      ABSL_LOCKS_EXCLUDED(mutex_);
  nccl::Result Call(nccl::Comm comm, FakeCall call) ABSL_LOCKS_EXCLUDED(mutex_);

  // The test's control.
  void Reset() ABSL_LOCKS_EXCLUDED(mutex_);
  void FailCall(const std::string& function, int rank, nccl::Result result)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void FailAsync(int rank, nccl::Result result) ABSL_LOCKS_EXCLUDED(mutex_);
  void Hang(int rank) ABSL_LOCKS_EXCLUDED(mutex_);
  void TellOfAborts() ABSL_LOCKS_EXCLUDED(mutex_);
  void SetVersion(int version) ABSL_LOCKS_EXCLUDED(mutex_);
  int OpenCommunicators() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Calls(int rank) const ABSL_LOCKS_EXCLUDED(mutex_);
  bool IsStreamDone(void* stream) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Group;
  struct Communicator {
    std::shared_ptr<Group> group;
    int rank = 0;
    uint64_t calls = 0;    // that it has made
    bool is_lost = false;  // of another rank's abort
  };
  // The ranks of one unique id.
  struct Group {
    int ranks = 0;
    std::set<int> joined;
    // By place in the order and rank: the calls that wait for the others.
    std::map<uint64_t, std::map<int, FakeCall>> waiting;
  };

  Communicator* Find(nccl::Comm comm) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notes the call; returns the injected result, or success.
  nccl::Result Note(const std::string& function, const std::string& text,
                    int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeBack(Communicator* communicator)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Perform(const std::map<int, FakeCall>& calls);

  mutable absl::Mutex mutex_;
  std::map<nccl::Comm, std::unique_ptr<Communicator>> communicators_
      ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Group>> groups_
      ABSL_GUARDED_BY(mutex_);  // by id
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<void*, int> under_way_ ABSL_GUARDED_BY(mutex_);  // by stream
  std::map<std::pair<std::string, int>, nccl::Result> failing_calls_
      ABSL_GUARDED_BY(mutex_);
  std::map<int, nccl::Result> async_errors_ ABSL_GUARDED_BY(mutex_);
  std::set<int> hanging_ ABSL_GUARDED_BY(mutex_);
  bool tells_of_aborts_ ABSL_GUARDED_BY(mutex_) = false;
  int version_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int, std::string> log_ ABSL_GUARDED_BY(mutex_);  // by rank
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TESTING_FAKE_COMMUNICATORS_H_
