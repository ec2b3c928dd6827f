#include "client/parameter_store/parameter_store.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/layout.h"
#include "proto/types/status_macros.h"

namespace optstate::client {

absl::StatusOr<std::unique_ptr<ParameterStore>> ParameterStore::Open(
    SessionOptions options) {
  options.fetches_parameters = true;
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Session> session,
                            Session::Open(std::move(options)));
  return std::make_unique<ParameterStore>(std::move(session));
}

ParameterStore::ParameterStore(std::unique_ptr<Session> session)
    : session_(std::move(session)) {
  const absl::Span<const ParameterSpec> specs = session_->layout().parameters();
  by_name_.reserve(specs.size());
  for (uint32_t p = 0; p < specs.size(); ++p) by_name_[specs[p].name] = p;
}

bool ParameterStore::needs_values() const {
  return !has_loaded_ && session_->info().load_required_from <
                             session_->layout().parameters().size();
}

absl::StatusOr<uint32_t> ParameterStore::Find(absl::string_view name) const {
  const auto found = by_name_.find(name);
  if (found != by_name_.end()) return found->second;
  return absl::NotFoundError(
      absl::StrCat("the job has no parameter \"", name, "\""));
}

absl::Status ParameterStore::BeginLoad() { return session_->BeginLoad(); }

absl::Status ParameterStore::Load(absl::string_view name, DType dtype,
                                  absl::Span<const std::byte> values) {
  OPTSTATE_ASSIGN_OR_RETURN(const uint32_t parameter, Find(name));
  return session_->Load(StateArray::kMaster, parameter, dtype, values);
}

absl::Status ParameterStore::FinishLoad() {
  OPTSTATE_RETURN_IF_ERROR(session_->FinishLoad());
  has_loaded_ = true;
  return absl::OkStatus();
}

absl::Status ParameterStore::Fetch(absl::string_view name,
                                   absl::Span<std::byte> out) {
  OPTSTATE_ASSIGN_OR_RETURN(const uint32_t parameter, Find(name));
  return session_->Fetch(StateArray::kParameter, parameter, out).status();
}

absl::Status ParameterStore::Prefetch(absl::Span<const std::string> names) {
  return Hint(ParameterHint::kPrefetch, names);
}

absl::Status ParameterStore::Release(absl::Span<const std::string> names) {
  return Hint(ParameterHint::kRelease, names);
}

absl::Status ParameterStore::Hint(ParameterHint hint,
                                  absl::Span<const std::string> names) {
  std::vector<uint32_t> parameters;
  parameters.reserve(names.size());
  for (const std::string& name : names) {
    OPTSTATE_ASSIGN_OR_RETURN(const uint32_t parameter, Find(name));
    parameters.push_back(parameter);
  }
  return session_->HintParameters(hint, parameters);
}

absl::Status ParameterStore::Push(absl::string_view name,
                                  absl::Span<const std::byte> gradient) {
  OPTSTATE_ASSIGN_OR_RETURN(const uint32_t parameter, Find(name));
  const ParameterSpec& spec = session_->layout().parameters()[parameter];
  const uint64_t bytes =
      static_cast<uint64_t>(spec.numel) * SizeInBytes(spec.gradient_dtype);
  if (gradient.size() != bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the gradient of parameter \"", name, "\" has ", bytes,
                     " bytes, not ", gradient.size()));
  }
  const void* const data = gradient.data();
  return session_->PushGradients(committed_step() + 1, /*micro_step=*/0,
                                 {&parameter, 1}, {&data, 1});
}

}  // namespace optstate::client
