#ifndef OPTSTATE_SERVER_SESSION_TESTING_VERIFIABLE_STORE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_VERIFIABLE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "storage/state_store.h"
#include "storage/verify_result.h"

namespace optstate::session {

// Returns the layout of such a store.
inline Layout OneParameterLayout() {
  LayoutSpec layout;
  layout.groups.resize(1);
  ParameterSpec parameter;
  parameter.name = "a";
  parameter.shape = {3};
  parameter.numel = 3;
  layout.parameters.push_back(parameter);
  return *Layout::Make(layout);
}

// A store that can be verified, and nothing else.
//
// Threads: as StateStore; Damage() and Mend() between two verifications.
class VerifiableStore final : public storage::StateStore {
 public:
  static constexpr uint64_t kRecords = 5;
  static constexpr uint64_t kRecordBytes = 4096;

  explicit VerifiableStore(const Layout* layout)
      : storage::StateStore(layout, kTileElements, {}) {}
  bool is_resident() const override { return false; }
  absl::Status status() const override { return absl::OkStatus(); }
  absl::StatusOr<Pin> PinRecord(size_t, Access) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t>) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<Pin> PinOfPass(size_t) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<storage::VerifyResult> Verify(
      absl::FunctionRef<bool(const storage::VerifyResult&)> progress) override {
    storage::VerifyResult result;
    result.damages = Begin();
    result.progress.damaged = result.damages.size();
    result.progress.records_total = kRecords;
    while (result.progress.records < kRecords) {
      ++result.progress.records;
      result.progress.bytes_read += kRecordBytes;
      if (!progress(result)) return absl::CancelledError("cancelled");
    }
    return result;
  }

  void Damage(storage::RecordDamage damage) {
    const absl::MutexLock lock(&mu_);
    damages_.push_back(std::move(damage));
  }
  void Mend() {
    const absl::MutexLock lock(&mu_);
    damages_.clear();
  }
  int verifications() {
    const absl::MutexLock lock(&mu_);
    return verifications_;
  }
  void AwaitVerifications(int count) {
    const absl::MutexLock lock(&mu_);
    const auto reached = [&] { return verifications_ >= count; };
    mu_.Await(absl::Condition(&reached));
  }

 private:
  std::vector<storage::RecordDamage> Begin() {
    const absl::MutexLock lock(&mu_);
    ++verifications_;
    return damages_;
  }

  absl::Mutex mu_;
  std::vector<storage::RecordDamage> damages_ ABSL_GUARDED_BY(mu_);
  int verifications_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_VERIFIABLE_STORE_H_
