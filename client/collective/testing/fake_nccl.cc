#include "client/collective/testing/fake_nccl.h"

#include <array>

#include "absl/strings/str_split.h"
#include "client/collective/nccl/shared_object.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

class FakeQueue final : public DeviceQueue {
 public:
  FakeQueue(int (*stream_is_done)(void* stream), const void* refused)
      : stream_is_done_(stream_is_done), refused_(refused) {}

  absl::Status WithDevice(absl::FunctionRef<absl::Status()> what) override {
    return what();
  }
  void* stream() const override {
    return const_cast<std::byte*>(scratch_.data());
  }
  absl::Status CheckMemory(const void* address) const override {
    if (refused_ == nullptr || address != refused_) return absl::OkStatus();
    return absl::InvalidArgumentError("the device does not reach this memory");
  }
  absl::StatusOr<bool> IsDone() override {
    return stream_is_done_(stream()) != 0;
  }
  void* scratch() const override { return stream(); }

 private:
  int (*const stream_is_done_)(void* stream);
  const void* const refused_;
  std::array<std::byte, 16> scratch_ = {};
};

}  // namespace

absl::StatusOr<FakeNccl> FakeNccl::Open() {
  OPTSTATE_ASSIGN_OR_RETURN(const SharedObject object,
                            SharedObject::Open(kFakeNcclPath));
  FakeNccl fake;
  OPTSTATE_RETURN_IF_ERROR(object.Find("fakeNcclReset", &fake.reset_));
  OPTSTATE_RETURN_IF_ERROR(object.Find("fakeNcclFailCall", &fake.fail_call_));
  OPTSTATE_RETURN_IF_ERROR(object.Find("fakeNcclFailAsync", &fake.fail_async_));
  OPTSTATE_RETURN_IF_ERROR(object.Find("fakeNcclHang", &fake.hang_));
  OPTSTATE_RETURN_IF_ERROR(
      object.Find("fakeNcclTellOfAborts", &fake.tell_of_aborts_));
  OPTSTATE_RETURN_IF_ERROR(
      object.Find("fakeNcclSetVersion", &fake.set_version_));
  OPTSTATE_RETURN_IF_ERROR(
      object.Find("fakeNcclOpenCommunicators", &fake.open_communicators_));
  OPTSTATE_RETURN_IF_ERROR(object.Find("fakeNcclCalls", &fake.calls_));
  OPTSTATE_RETURN_IF_ERROR(
      object.Find("fakeNcclStreamIsDone", &fake.stream_is_done_));
  fake.Reset();
  return fake;
}

std::vector<std::string> FakeNccl::Calls(int rank) const {
  std::string text(calls_(rank, nullptr, 0), '\0');
  calls_(rank, text.data(), text.size());
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

std::unique_ptr<DeviceQueue> FakeNccl::MakeQueue(const void* refused) const {
  return std::make_unique<FakeQueue>(stream_is_done_, refused);
}

}  // namespace optstate::client
