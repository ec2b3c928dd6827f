#ifndef OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_LIBRARY_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_LIBRARY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/collective/nccl/nccl_api.h"

namespace optstate::client::nccl {

// NCCL, opened at run time.
//
// Threads: thread-safe, as NCCL's functions are for different communicators.
class Library {
 public:
  // Opens `path`; empty: $OPTSTATE_NCCL_LIBRARY, else libnccl.so.2 as the
  // loader finds it (LD_LIBRARY_PATH, ldconfig). NOT_FOUND: there is none;
  // FAILED_PRECONDITION: its version is not from 2.14 on; UNIMPLEMENTED: it
  // lacks a function.
  static absl::StatusOr<Library> Open(const std::string& path);

  const Api& api() const { return api_; }
  int version() const { return version_; }
  const std::string& path() const { return path_; }

  // Returns OK for success and for what is in progress; else an error with
  // NCCL's texts. `comm`: may be null.
  absl::Status ToStatus(Result result, absl::string_view call, Comm comm) const;

 private:
  Library() = default;

  std::string path_;
  int version_ = 0;
  Api api_ = {};
};

}  // namespace optstate::client::nccl

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_LIBRARY_H_
