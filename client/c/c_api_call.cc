#include "client/c/c_api_call.h"

#include <exception>
#include <new>

#include "absl/strings/str_cat.h"

namespace optstate::client {
namespace {

std::string& ThreadError() {
  thread_local std::string text;
  return text;
}

int Report(const absl::Status& status) {
  if (!status.ok()) ThreadError() = std::string(status.message());
  return static_cast<int>(status.code());
}

}  // namespace

const std::string& LastError() { return ThreadError(); }

int Guarded(absl::FunctionRef<absl::Status()> call) {
  try {
    return Report(call());
  } catch (const std::bad_alloc&) {
    return Report(absl::ResourceExhaustedError("out of memory"));
  } catch (const std::exception& error) {
    return Report(absl::InternalError(error.what()));
  } catch (...) {
    return Report(absl::InternalError("unknown exception"));
  }
}

int Guarded(optstate_session* session,
            absl::FunctionRef<absl::Status(Session&)> call) {
  return Guarded([&]() -> absl::Status {
    if (session == nullptr) {
      return absl::InvalidArgumentError("session is NULL");
    }
    return call(*session->session);
  });
}

absl::Status CheckArrays(const void* a, const void* b, size_t count) {
  if (count == 0 || (a != nullptr && b != nullptr)) return absl::OkStatus();
  return absl::InvalidArgumentError("an array is NULL");
}

absl::StatusOr<absl::Span<const std::byte>> FindParameter(
    const Session& session, uint32_t parameter) {
  const size_t count = session.layout().parameters().size();
  if (parameter < count) return session.parameter(parameter);
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", parameter, " of ", count));
}

}  // namespace optstate::client
