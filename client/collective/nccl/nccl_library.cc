#include "client/collective/nccl/nccl_library.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "client/collective/nccl/shared_object.h"
#include "proto/types/status_macros.h"

namespace optstate::client::nccl {
namespace {

std::string PathOr(const std::string& path) {
  if (!path.empty()) return path;
  const char* const chosen = std::getenv("OPTSTATE_NCCL_LIBRARY");
  return chosen != nullptr && *chosen != '\0' ? chosen : "libnccl.so.2";
}

absl::Status FindAll(const SharedObject& object, Api* api) {
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclGetVersion", &api->GetVersion));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclGetUniqueId", &api->GetUniqueId));
  OPTSTATE_RETURN_IF_ERROR(
      object.Find("ncclCommInitRankConfig", &api->CommInitRankConfig));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclCommFinalize", &api->CommFinalize));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclCommDestroy", &api->CommDestroy));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclCommAbort", &api->CommAbort));
  OPTSTATE_RETURN_IF_ERROR(
      object.Find("ncclCommGetAsyncError", &api->CommGetAsyncError));
  OPTSTATE_RETURN_IF_ERROR(
      object.Find("ncclGetErrorString", &api->GetErrorString));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclGetLastError", &api->GetLastError));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclAllReduce", &api->AllReduce));
  OPTSTATE_RETURN_IF_ERROR(
      object.Find("ncclReduceScatter", &api->ReduceScatter));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclReduce", &api->Reduce));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclAllGather", &api->AllGather));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclBroadcast", &api->Broadcast));
  OPTSTATE_RETURN_IF_ERROR(object.Find("ncclGroupStart", &api->GroupStart));
  return object.Find("ncclGroupEnd", &api->GroupEnd);
}

absl::StatusCode CodeOf(Result result) {
  switch (result) {
    case kSystemError:
    case kRemoteError:
      return absl::StatusCode::kUnavailable;
    case kInvalidUsage:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

// Returns "2.14.3". Up to 2.8 the major version was coded as thousands.
std::string VersionText(int version) {
  if (version < 10000) {
    return absl::StrCat(version / 1000, ".", version / 100 % 10, ".",
                        version % 100);
  }
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".",
                      version % 100);
}

}  // namespace

absl::StatusOr<Library> Library::Open(const std::string& path) {
  Library library;
  library.path_ = PathOr(path);
  const absl::StatusOr<SharedObject> object = SharedObject::Open(library.path_);
  if (!object.ok()) {
    return Annotate(object.status(),
                    "NCCL is not there (install it, or name the file in "
                    "$OPTSTATE_NCCL_LIBRARY)");
  }
  // An old library is told by its version, not by the first function it lacks.
  OPTSTATE_RETURN_IF_ERROR(
      object->Find("ncclGetVersion", &library.api_.GetVersion));
  const Result result = library.api_.GetVersion(&library.version_);
  if (result != kSuccess) {
    return absl::InternalError(
        absl::StrCat("ncclGetVersion of ", library.path_, ": result ", result));
  }
  if (library.version_ < kVersionMin || library.version_ >= kVersionEnd) {
    return absl::FailedPreconditionError(absl::StrCat(
        library.path_, " is NCCL ", VersionText(library.version_),
        ", and NCCL 2 from ", VersionText(kVersionMin), " on is needed"));
  }
  OPTSTATE_RETURN_IF_ERROR(FindAll(*object, &library.api_));
  return library;
}

absl::Status Library::ToStatus(Result result, absl::string_view call,
                               Comm comm) const {
  if (result == kSuccess || result == kInProgress) return absl::OkStatus();
  const char* const text = api_.GetErrorString(result);
  const char* const last = comm == nullptr ? nullptr : api_.GetLastError(comm);
  std::string message = absl::StrCat(
      call, ": ", text == nullptr ? "unknown error" : text, " [", result, "]");
  if (last != nullptr && *last != '\0') absl::StrAppend(&message, ": ", last);
  return absl::Status(CodeOf(result), message);
}

}  // namespace optstate::client::nccl
