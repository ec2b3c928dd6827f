#ifndef OPTSTATE_CLIENT_PARAMETER_STORE_PARAMETER_STORE_H_
#define OPTSTATE_CLIENT_PARAMETER_STORE_PARAMETER_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/session_types.h"
#include "proto/types/dtype.h"

namespace optstate::client {

// The parameters of a model that does not fit, by name, over a Session that has
// none of them in memory: a layer's are fetched when it is computed.
//
//   SessionOptions options;             // endpoint "grpc:unix:PATH"
//   options.storage.placement = Placement::kNvme;
//   options.storage.parameters_on_disk = true;
//   auto store = ParameterStore::Open(options);
//   if ((*store)->needs_values()) {
//     BeginLoad(); Load(name, ...) for each parameter; FinishLoad();
//   }
//   for each step:
//     for each layer: Prefetch(the next one's); Fetch(name, memory); Release()
//     for each layer, backwards: Push(name, gradient)
//     Step({.step = committed_step() + 1, .groups = ...})
//
// Over shared memory this process has the memory of all gradients, in the
// segment that it shares with the daemon; over gRPC that of one Push().
//
// Errors: NOT_FOUND for a name that the job lacks; else see Session.
// Threads: one at a time.
class ParameterStore {
 public:
  // Opens a session with `fetches_parameters` set.
  static absl::StatusOr<std::unique_ptr<ParameterStore>> Open(
      SessionOptions options);
  // Takes a session that was opened so.
  explicit ParameterStore(std::unique_ptr<Session> session);

  Session& session() { return *session_; }
  uint64_t committed_step() const { return session_->committed_step(); }
  // Says whether the job is new: values are to be loaded before all else.
  bool needs_values() const;

  // Loads initial values, a parameter at a time and in any order; every rank
  // loads all. See Session::BeginLoad().
  absl::Status BeginLoad();
  absl::Status Load(absl::string_view name, DType dtype,
                    absl::Span<const std::byte> values);
  absl::Status FinishLoad();

  // Copies a parameter as of the committed step, of its own dtype.
  absl::Status Fetch(absl::string_view name, absl::Span<std::byte> out);
  // Says which parameters are going to be fetched: the daemon reads them ahead,
  // as far as it has room, until they are released or a step has changed them.
  absl::Status Prefetch(absl::Span<const std::string> names);
  absl::Status Release(absl::Span<const std::string> names);

  // Pushes the gradient of a parameter, whole, for the next step; the caller
  // may reuse its memory. At most once a step.
  absl::Status Push(absl::string_view name,
                    absl::Span<const std::byte> gradient);
  // Takes the step with what was pushed; see Session::Commit().
  absl::StatusOr<Outcome> Step(const CommitOptions& options) {
    return session_->Commit(options);
  }

 private:
  absl::StatusOr<uint32_t> Find(absl::string_view name) const;
  absl::Status Hint(ParameterHint hint, absl::Span<const std::string> names);

  std::unique_ptr<Session> session_;
  absl::flat_hash_map<std::string, uint32_t> by_name_;
  bool has_loaded_ = false;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_PARAMETER_STORE_PARAMETER_STORE_H_
