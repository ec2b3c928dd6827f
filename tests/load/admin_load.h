#ifndef OPTSTATE_TESTS_LOAD_ADMIN_LOAD_H_
#define OPTSTATE_TESTS_LOAD_ADMIN_LOAD_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "tests/load/stretch.h"

namespace optstate::load {

// Returns a channel with a connection of its own: by default gRPC has all
// channels of a process to one address share one.
std::shared_ptr<grpc::Channel> Connect(const std::string& socket);
std::unique_ptr<v1::Admin::Stub> ConnectAdmin(const std::string& socket);

// The outcome of many calls of Admin.
struct AdminTally {
  // How long the calls took that were answered, in ms, by method.
  std::map<std::string, std::vector<double>> answered_ms;
  std::map<absl::StatusCode, uint64_t> refused;
  // Jobs of lists whose engines did not answer in time.
  uint64_t unanswered_jobs = 0;
  // Says what is wrong with the first answer that is, or with a refusal that
  // has no text; empty: nothing.
  std::string wrong;
  uint64_t made = 0;
  double seconds = 0;

  uint64_t answered() const;
  std::vector<double> all_ms() const;
  void Add(const AdminTally& other);
  std::string ToString() const;
};

// Calls GetStatus, ListJobs and GetJob from several threads over several
// connections.
//
// Threads: one at a time; it makes its own.
class AdminLoad {
 public:
  struct Options {
    std::string socket;
    std::vector<std::string> jobs;  // all that the daemon has
    size_t channels = 1;
    size_t threads = 1;  // calls under way at once
    // 0: each thread makes its next call when the last one was answered.
    double calls_per_second = 0;
    // One of so many calls has all engines asked: GetStatus and ListJobs in
    // turn. The others are GetJob, of each job in turn.
    uint64_t lists_every = 1;
    // The age that what engines have said may have; 0: it is of the call.
    uint32_t age_max_ms = 0;
  };

  explicit AdminLoad(Options options);

  // Makes `stretch` calls.
  AdminTally Run(const Stretch& stretch);
  // Makes as many calls of gRPC's own health service, which the same server
  // answers without any work: no other call can be faster on this machine.
  AdminTally RunBare(const Stretch& stretch);

 private:
  struct Connection {
    std::unique_ptr<v1::Admin::Stub> admin;
    std::unique_ptr<grpc::GenericStub> bare;
  };
  using Call =
      absl::FunctionRef<void(uint64_t number, const Connection&, AdminTally*)>;

  AdminTally RunThreads(const Stretch& stretch, Call call);
  void RunThread(size_t thread, const Stretch& stretch, absl::Time begin,
                 Call call, AdminTally* tally);
  void CallAdmin(uint64_t number, v1::Admin::Stub* stub,
                 AdminTally* tally) const;

  const Options options_;
  std::vector<Connection> connections_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_ADMIN_LOAD_H_
